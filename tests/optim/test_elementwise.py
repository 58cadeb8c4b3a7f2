"""Which of torch's optimizers may update shards, up to the step at which one does other things."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_shard import ConfigError
from lightning_shard.optim.elementwise import (
    DIFFERENCE,
    _Trial,
    in_shards,
    needs_full_parameters,
    why_not_elementwise,
    why_not_separate,
)
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks
from tests.groups import engine_of

ELEMENTWISE: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: optim.Adam(p),
    "Adam amsgrad": lambda p: optim.Adam(p, amsgrad=True),
    "Adam fused": lambda p: optim.Adam(p, fused=True),
    "Adam foreach": lambda p: optim.Adam(p, foreach=True),
    "Adam tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.1)),
    "AdamW": lambda p: optim.AdamW(p, weight_decay=0.5),
    "Adamax": lambda p: optim.Adamax(p),
    "NAdam": lambda p: optim.NAdam(p),
    "RAdam": lambda p: optim.RAdam(p),
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": lambda p: optim.Rprop(p),
    "Adagrad": lambda p: optim.Adagrad(p),
    "Adadelta": lambda p: optim.Adadelta(p),
    "ASGD": lambda p: optim.ASGD(p),
}
FULL: dict[str, Callable[[Any], Optimizer]] = {
    "Adafactor": lambda p: optim.Adafactor(p),
    "LBFGS": lambda p: optim.LBFGS(p),
    "LBFGS that searches lines": lambda p: optim.LBFGS(p, line_search_fn="strong_wolfe"),
    "Muon": lambda p: optim.Muon(p),
    "SparseAdam": lambda p: optim.SparseAdam(p),
}


class Normalised(Optimizer):
    """Divides by the norm of the full gradient, as LARS does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


def make(kind: Callable[[Any], Optimizer]) -> Optimizer:
    torch.manual_seed(0)
    return kind([nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(2, 2))])


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str) -> None:
    assert why_not_elementwise(make(ELEMENTWISE[name])) is None


@pytest.mark.parametrize("name", FULL)
def test_full_matrices(name: str) -> None:
    assert why_not_elementwise(make(FULL[name])) is not None


def test_an_optimizer_of_the_users() -> None:
    assert why_not_elementwise(make(Normalised)) is not None


@pytest.mark.parametrize("name", [*ELEMENTWISE, "Adafactor", "Muon"])
def test_full_parameters_by_themselves(name: str) -> None:
    assert why_not_separate(make({**ELEMENTWISE, **FULL}[name])) is None


def test_what_one_parameter_gets_depends_on_the_others() -> None:
    class ClipsByItself(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
            return super().step(closure)

    assert "came out differently" in str(
        why_not_separate(ClipsByItself(make(Normalised).param_groups))
    )
    assert why_not_separate(make(FULL["LBFGS"])) is not None
    assert why_not_separate(make(FULL["LBFGS that searches lines"])) is not None


def test_what_one_shard_gets_depends_on_the_others() -> None:
    """A rank has one shard, so shards are tried one by one."""

    class ScaledByAll(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
            return super().step()

    assert why_not_elementwise(ScaledByAll(make(Normalised).param_groups)) is not None


def scaled(param: Any) -> Any:
    return param.grad / param.grad.norm()


class FactorsLargeMatrices(optim.SGD):
    """Uses norms of matrices above a size alone, as Adafactors that factor from 128 on."""

    def changed(self, param: Any) -> Any:
        return scaled(param) if param.ndim == 2 and min(param.shape) >= 128 else param.grad

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad = self.changed(param)
        return super().step(closure)


class CentralisesConvolutions(FactorsLargeMatrices):
    """Subtracts each filter's mean from convolutions' gradients alone, as Ranger may."""

    def changed(self, param: Any) -> Any:
        grad = param.grad
        return grad - grad.mean((1, 2, 3), keepdim=True) if grad.ndim == 4 else grad


class SkipsIdleRows(FactorsLargeMatrices):
    """Decays the rows alone that a batch has reached, as optimizers of embeddings do."""

    def changed(self, param: Any) -> Any:
        grad = param.grad
        is_used = grad.abs().sum(-1, keepdim=True) > 0 if grad.ndim == 2 else 1.0
        return grad + 0.1 * param.detach() * is_used


class CautiousFromLater(FactorsLargeMatrices):
    """Counts the signs that agree with the momentum's, which all do at first."""

    def changed(self, param: Any) -> Any:
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        return scaled(param) if state["step"] > 4 else param.grad


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (FactorsLargeMatrices, (128, 200)),
        (FactorsLargeMatrices, (5000, 300)),
        (CentralisesConvolutions, (3, 3, 2, 2)),
        (CentralisesConvolutions, (512, 1, 7, 7)),
        (SkipsIdleRows, (10, 3)),
        (CautiousFromLater, (2, 2)),
    ],
)
def test_what_an_optimizer_does_to_large_or_other_tensors_alone_is_tried(
    kind: Any, shape: tuple[int, ...]
) -> None:
    """Timm's AdamP and Adafactor ("big vision") were silently wrong on shards."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(shape)), nn.Parameter()]
    optimizer = kind(params, lr=0.1)
    assert needs_full_parameters(optimizer, optimizer.param_groups[0])


def test_small_matrices_of_an_optimizer_that_factors_large_ones_stay_in_shards() -> None:
    optimizer = FactorsLargeMatrices([nn.Parameter(torch.ones(64, 64))], lr=0.1)
    assert why_not_elementwise(optimizer) is None


class NeedsClosure(optim.SGD):
    """Takes no step without a closure."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = closure()
        super().step()
        return loss


class NormalisedByClosure(NeedsClosure):
    """The same, but divides by the norm of what the closure has made."""

    def step(self, closure: Any) -> Any:
        loss = closure()
        for param in self.param_groups[0]["params"]:
            param.grad.div_(param.grad.norm())
        optim.SGD.step(self)
        return loss


class InsistsOnClosure(optim.SGD):
    """Says only in its step that it needs one."""

    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise RuntimeError("A closure is required.")
        return super().step(closure)


@pytest.mark.parametrize("kind", [NeedsClosure, InsistsOnClosure])
def test_an_optimizer_that_requires_a_closure_is_tried_with_one(kind: Any) -> None:
    assert why_not_elementwise(make(kind)) is None
    assert why_not_separate(make(kind)) is None
    assert why_not_elementwise(make(NormalisedByClosure)) is not None


@pytest.mark.parametrize("kind", [optim.Adafactor, optim.Muon, Normalised])
def test_a_warm_up_from_zero_does_not_hide_the_need_for_full_matrices(
    kind: Callable[[Any], Optimizer],
) -> None:
    optimizer = make(kind)
    LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    assert why_not_elementwise(optimizer) is not None


def test_each_group_is_asked() -> None:
    class SecondGroupIsOdd(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    if group["odd"] and param.grad is not None:
                        param.grad.div_(param.grad.norm())
            return super().step(closure)

    groups = [
        {"params": [nn.Parameter(torch.ones(2))], "odd": odd, "lr": 0.1} for odd in (False, True)
    ]
    assert why_not_elementwise(SecondGroupIsOdd(groups)) is not None
    assert why_not_elementwise(SecondGroupIsOdd(groups[:1])) is None


@pytest.mark.parametrize("name", [*ELEMENTWISE, *FULL])
def test_asking_leaves_no_trace(name: str) -> None:
    optimizer = make({**ELEMENTWISE, **FULL}[name])
    steps: list[str] = []
    optimizer.register_step_post_hook(lambda *_: steps.append("hook"))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    values = [param.detach().clone() for param in params]
    options = [
        {key: repr(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    state, rng = {p: dict(s) for p, s in optimizer.state.items()}, torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        why_not_elementwise(optimizer)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(a, b) for a, b in zip(params, values, strict=True))
    assert all(param.grad is None for param in params)
    assert {p: dict(s) for p, s in optimizer.state.items()} == state or name == "Adagrad"
    assert [
        {key: repr(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ] == options
    assert steps == []


class OfPairs(Optimizer):
    """Moves the factors of a low-rank product together, as LoRA-RITE does, and no odd one."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = group["params"]
            for left, right in zip(params[::2], params[1::2], strict=False):
                for one, other in ((left, right), (right, left)):
                    one.sub_(one.grad / other.grad.norm(), alpha=group["lr"])


def test_an_optimizer_that_moves_pairs_alone_is_not_taken_for_an_element_wise_one() -> None:
    """Nothing moved in its trial, which then found no difference."""
    optimizer = OfPairs([torch.randn(4, 6), torch.randn(6, 4)])
    assert why_not_elementwise(optimizer) == why_not_separate(optimizer) == DIFFERENCE


WARM_UP = 64  # steps more than the trial before a fit takes


class NormsAfterWarmUp(optim.SGD):
    """Divides by the norm of each gradient after some steps, as trust ratios do."""

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["step"] = state.get("step", 0) + 1
            if param.grad is not None and state["step"] > WARM_UP:
                param.grad = param.grad / param.grad.norm()
        return super().step(closure)


class NormsOfLargeOnes(optim.SGD):
    """Clips each gradient that is large."""

    limit = 100.0

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None and param.grad.norm() > self.limit:
                param.grad = param.grad * (self.limit / param.grad.norm())
        return super().step(closure)


class NormsWhere(optim.SGD):
    """Divides by norms in some groups."""

    def divides(self, group: dict[str, Any]) -> bool:
        raise NotImplementedError

    def step(self, closure: Any = None) -> Any:
        for group in filter(self.divides, self.param_groups):
            for param in group["params"]:
                if param.grad is not None:
                    param.grad = param.grad / param.grad.norm()
        return super().step(closure)


class NormsOnDemand(NormsWhere):
    """Begins with norms when a scheduler says so."""

    def divides(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"] > 0.5)


class NormsAtLargeRates(NormsWhere):
    """Divides by norms where steps would be large, which those at a fixed rate are not."""

    def divides(self, group: dict[str, Any]) -> bool:
        return bool(group["lr"] > 0.05)


class NormsAtSmallRates(NormsWhere):
    """Divides by norms where rates are small, so that hardly a digit of a weight changes."""

    def divides(self, group: dict[str, Any]) -> bool:
        return bool(group["lr"] < 1e-3)


class MyAdamW(optim.AdamW):
    """Element-wise for good."""


class FailsBesideTheRun(MyAdamW):
    """Takes one parameter's gradients only after the first steps."""

    def step(self, closure: Any = None) -> Any:
        params = self.param_groups[0]["params"]
        if len(self.state) == len(params) and params[0].dtype == torch.float64:
            raise RuntimeError("not of this format")
        return super().step(closure)


def train(
    make: Any, *, stage: int, num_steps: int, resume_at: int = 0, catches: bool = True
) -> int:
    """Return the number of steps that were taken."""

    def fn(rank: int) -> int:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer: Optimizer = make(model.parameters())
        if resume_at:
            for param in model.parameters():
                optimizer.state[param]["step"] = resume_at
        engine = engine_of(model, stage=stage)
        sharded = ShardedOptimizer(optimizer, engine)
        for number in range(num_steps):
            if isinstance(optimizer, NormsOnDemand):
                optimizer.param_groups[0]["momentum"] = 0.1 * number
            with engine.step(), engine.backward():
                model(torch.randn(2, 4)).square().mean().backward()
            try:
                optimizer.step()
            except ConfigError:
                if not catches:
                    raise
                return number
            optimizer.zero_grad()
        sharded.detach()
        engine.detach(restore=True)
        return num_steps

    return run_ranks(fn, 2)[0]  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_norms_from_a_later_step_on_are_noticed_in_that_step(stage: int) -> None:
    """Norms from a later step on passed the trial."""
    make = lambda params: NormsAfterWarmUp(params, lr=0.1)  # noqa: E731
    assert why_not_elementwise(make([nn.Parameter(torch.ones(3))])) is None
    assert train(make, stage=stage, num_steps=WARM_UP + 3) == WARM_UP


def test_the_step_is_named() -> None:
    class Ends(NormsAfterWarmUp):
        """The same; its error ends the run."""

    with pytest.raises(ConfigError, match="from its step 65 on, Ends does not update each element"):
        train(lambda params: Ends(params, lr=0.1), stage=2, num_steps=WARM_UP + 2, catches=False)


def test_norms_of_large_gradients_are_found_before_a_fit() -> None:
    """The trial had gradients of one size, and they were found by its continuation."""
    optimizer = NormsOfLargeOnes([nn.Parameter(torch.ones(3))], lr=0.1)
    assert why_not_elementwise(optimizer) is not None


def test_norms_that_a_scheduler_switches_on_are_noticed() -> None:
    """Norms that a scheduler switches on passed the trial."""
    assert train(lambda params: NormsOnDemand(params, lr=0.1), stage=2, num_steps=9) == 6


@pytest.mark.parametrize(("kind", "rate"), [(NormsAtLargeRates, 0.1), (NormsAtSmallRates, 1e-5)])
def test_norms_at_the_users_rate_only_are_noticed(kind: Any, rate: float) -> None:
    """Norms at the user's rate only passed the trial."""
    assert why_not_elementwise(kind([nn.Parameter(torch.ones(3))], lr=rate)) is None
    assert train(lambda params: kind(params, lr=rate), stage=2, num_steps=3) == 0


def test_a_rate_that_leads_away_is_not_taken_for_norms() -> None:
    class MySGD(optim.SGD):
        """Element-wise, and with this decay its weights grow a thousandfold in each step."""

    optimizer = MySGD([nn.Parameter(torch.ones(3))], lr=1.0, weight_decay=1e3)
    trial = _Trial(optimizer, optimizer.param_groups[0], in_shards, None)
    assert all(trial.take_step(with_closure=False) for _ in range(150))


def test_a_run_that_is_resumed_counts_on() -> None:
    make = lambda params: NormsAfterWarmUp(params, lr=0.1)  # noqa: E731
    assert train(make, stage=2, num_steps=5, resume_at=WARM_UP - 1) <= 2


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_element_wise_optimizer_of_the_users_goes_on(stage: int) -> None:
    assert train(lambda params: MyAdamW(params), stage=stage, num_steps=12) == 12


def test_full_parameters_need_no_trial() -> None:
    make = lambda params: NormsAfterWarmUp(params, lr=0.1)  # noqa: E731
    assert train(make, stage=0, num_steps=WARM_UP + 3) == WARM_UP + 3


def test_an_optimizer_that_cannot_be_tried_beside_the_run_goes_on_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="cannot be tried on a small matrix beside the run"):
        assert train(lambda params: FailsBesideTheRun(params), stage=2, num_steps=4) == 4


def test_an_optimizer_with_an_attribute_is_tried_once_it_has_loaded_a_state() -> None:
    """Loading adds `differentiable` to the defaults, which its constructor does not take."""

    class Signed(Optimizer):
        def __init__(self, params: Any, sign: float = 1.0) -> None:
            super().__init__(params, {})
            self.sign = sign

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                param.sub_(self.sign * param.grad)

    optimizer = Signed([nn.Parameter(torch.ones(3))])
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.defaults == {"differentiable": False}
    assert why_not_elementwise(optimizer) is None
