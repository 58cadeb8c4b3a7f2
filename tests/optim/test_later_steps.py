"""An optimizer that does something else from some step on is found at that step."""

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from lightning_shard import ConfigError
from lightning_shard.backends.registry import get_backend
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.optim.elementwise import in_shards, why_not_elementwise
from lightning_shard.optim.later_steps import _Trial
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks

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


class NormsOnDemand(optim.SGD):
    """Begins with norms when a scheduler says so."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"] if group["momentum"] > 0.5 else ():
                if param.grad is not None:
                    param.grad = param.grad / param.grad.norm()
        return super().step(closure)


class NormsAtLargeRates(optim.SGD):
    """Divides by norms where steps would be large, which those at a fixed rate are not."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"] if group["lr"] > 0.05 else ():
                if param.grad is not None:
                    param.grad = param.grad / param.grad.norm()
        return super().step(closure)


class NormsAtSmallRates(optim.SGD):
    """Divides by norms where rates are small, so that hardly a digit of a weight changes."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"] if group["lr"] < 1e-3 else ():
                if param.grad is not None:
                    param.grad = param.grad / param.grad.norm()
        return super().step(closure)


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
        assert torch.distributed.group.WORLD is not None
        ranks = get_backend("in_process").collectives(torch.distributed.group.WORLD)
        engine = DataParallelEngine(model, ranks, EngineOptions(stage=stage))
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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_norms_from_a_later_step_on_passed_the_trial(stage: int) -> None:
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


def test_norms_that_a_scheduler_switches_on_passed_the_trial() -> None:
    assert train(lambda params: NormsOnDemand(params, lr=0.1), stage=2, num_steps=9) == 6


@pytest.mark.parametrize(("kind", "rate"), [(NormsAtLargeRates, 0.1), (NormsAtSmallRates, 1e-5)])
def test_norms_at_the_users_rate_only_passed_the_trial(kind: Any, rate: float) -> None:
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


def test_an_optimizer_with_an_attribute_could_not_be_tried_once_it_had_loaded_a_state() -> None:
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
