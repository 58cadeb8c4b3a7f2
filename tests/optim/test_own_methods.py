"""What an optimizer of another package does between two steps, and before a closure."""

from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

import lightning_shard
from lightning_shard import AsyncSGDStrategy, ConfigError, LocalSGDStrategy
from lightning_shard.optim import elementwise
from lightning_shard.optim.elementwise import OwnMethods
from tests.optim.foreign_optimizers import MADGRAD, EarlySteps, OfOwnForm, ScheduleFree
from tests.optim.test_foreign_optimizers import style_with
from tests.strategies.parity import ignoring, quiet_trainer
from tests.strategies.schemes import SCHEMES, OfRanks
from tests.strategies.stacks import fit

pytestmark = ignoring()

SOME = ["zero2", "pipeline"] + [
    pytest.param(one, marks=pytest.mark.slow)
    for one in ("zero1", "zero3", "tensor", "hybrid", "tensor_zero2")
]
ALONE: dict[str, Any] = {
    "local_sgd": (2, lambda: LocalSGDStrategy(backend="in_process", sync_every=2)),
    "async_sgd": (2, lambda: AsyncSGDStrategy(backend="in_process")),
}


class Averages(OfRanks):
    """Validates with averaged weights, as schedule-free optimizers are documented."""

    def configure_optimizers(self) -> Any:
        return ScheduleFree(self.parameters(), 0.05, train_mode=True)

    @property
    def _optimizer(self) -> Any:
        return self.optimizers()

    def val_dataloader(self) -> Any:
        return DataLoader(self.dataset(), batch_size=12)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self._optimizer.eval()

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        self._optimizer.train()


def validated(strategy: Any, num_ranks: int) -> tuple[float, list[Tensor]]:
    torch.manual_seed(0)
    model = Averages()
    trainer = quiet_trainer(
        strategy=strategy, devices=num_ranks, max_epochs=1, val_check_interval=2,
        limit_val_batches=2, use_distributed_sampler=False, max_steps=-1, accumulate_grad_batches=1,
    )  # fmt: skip
    trainer.fit(model)
    return float(trainer.callback_metrics["val"]), [p.detach() for p in model.parameters()]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SOME)
def test_a_validation_with_averaged_weights_gets_state_of_their_shape(scheme: str) -> None:
    """`optimizer.eval()` met full weights and a shard of the state."""
    num_ranks, make = SCHEMES[scheme]
    loss, weights = validated(make(), num_ranks)
    expected, expected_weights = validated("auto", 1)
    assert loss == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-6)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ALONE)
def test_ranks_that_are_alone_validate_with_averages_and_go_on_from_their_own(scheme: str) -> None:
    """Local SGD took each rank's state to the weights of all, and refused what came out."""
    num_ranks, make = ALONE[scheme]
    loss, weights = validated(make(), num_ranks)
    assert 0 < loss < 2
    if scheme == "local_sgd":  # who asks for no validation trains alike
        torch.manual_seed(0)
        other = Averages()
        trainer = quiet_trainer(
            strategy=make(), devices=num_ranks, max_epochs=1, limit_val_batches=0,
            use_distributed_sampler=False, max_steps=-1, accumulate_grad_batches=1,
        )  # fmt: skip
        trainer.fit(other)
        expected = [p.detach() for p in other.parameters()]
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


def test_under_fabric_too() -> None:
    def train(fabric: Fabric) -> float:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        model, optimizer = fabric.setup(net, ScheduleFree(net.parameters(), 0.1, train_mode=True))
        for _ in range(3):
            optimizer.train()
            fabric.backward(model(torch.ones(2, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            optimizer.eval()
        return float(model(torch.ones(2, 4)).square().mean().detach())

    alone = Fabric(accelerator="cpu", devices=1).launch(train)
    ranks = Fabric(accelerator="cpu", devices=2, strategy="zero2_in_process").launch(train)
    assert ranks == pytest.approx(alone, rel=1e-5)


def test_only_what_goes_element_by_element_runs_on_shards() -> None:
    params = [nn.Parameter(torch.randn(4, 5))]
    optimizer = ScheduleFree(params, train_mode=True)
    methods = OwnMethods(optimizer, lambda call, _: ("in the view", call()))
    runs = [name for name, obstacle in methods.obstacles.items() if not obstacle]
    assert sorted(runs) == ["eval", "train"]
    assert optimizer.eval() == ("in the view", None)
    other = ScheduleFree(params, train_mode=True)
    assert other.eval() is None
    methods.detach()
    assert optimizer.eval() is None
    assert not OwnMethods(SGD(params, lr=0.1), lambda call, _: call()).obstacles


@pytest.mark.parametrize("broken", ["are_steps_alike", "snapshot"])
def test_an_error_of_the_trials_own_is_raised(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was raised in a trial counted as "it needs a closure", so that defects were hid."""

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError(broken)

    optimizer = EarlySteps([nn.Parameter(torch.randn(4, 5))], 0.05)
    monkeypatch.setattr(elementwise, broken, fail)
    with pytest.raises(ZeroDivisionError, match=broken):
        OwnMethods(optimizer, lambda call, _: call())


class Undecided(ScheduleFree):
    """Has a method that a small matrix does not let a trial call."""

    @torch.no_grad()
    def rescale(self) -> None:
        for param in self.param_groups[0]["params"]:
            if param.shape != (8, 6):
                raise ValueError(f"got {tuple(param.shape)}")
            param.mul_(1 + 0 * len(self.state[param]))


@pytest.mark.slow
def test_what_a_trial_says_against_a_method_is_told_when_it_is_called() -> None:
    """A method whose trial raises, or differs on parts, was called on what did not fit, unsaid."""

    def train(fabric: Fabric) -> None:
        net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 1, bias=False))
        model, optimizer = fabric.setup(net, Undecided(net[0].parameters(), train_mode=True))
        fabric.backward(model(torch.ones(2, 6)).square().mean())
        optimizer.step()
        optimizer.eval()
        optimizer.rescale()

    with pytest.warns(UserWarning, match=r"Undecided is called .* rescale, .* ValueError: got \("):
        Fabric(accelerator="cpu", devices=2, strategy="zero2_in_process").launch(train)
    Fabric(accelerator="cpu", devices=2, strategy="shard_ddp_in_process").launch(train)
    methods = OwnMethods(ScheduleFree([nn.Parameter(torch.ones(2, 2))]), lambda _, why: why)
    assert "normalize, in a trial, the parts" in methods.optimizer.normalize()  # type: ignore[attr-defined]


class Counts(OfRanks):
    def configure_optimizers(self) -> Any:
        return MADGRAD(self.parameters(), 0.1)


def _plain_trainer(strategy: Any, num_ranks: int, num_epochs: int) -> L.Trainer:
    return quiet_trainer(
        strategy=strategy, devices=num_ranks, max_epochs=num_epochs, max_steps=-1,
        accumulate_grad_batches=1, gradient_clip_val=None, use_distributed_sampler=False,
    )  # fmt: skip


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SOME)
def test_a_count_of_the_optimizers_own_is_kept(scheme: str, tmp_path: Any) -> None:
    """`state["k"]`, which torch allows, was taken for the state of a parameter."""
    num_ranks, make = SCHEMES[scheme]
    torch.manual_seed(0)
    model = Counts()
    trainer = _plain_trainer(make(), num_ranks, 1)
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=False)["optimizer_states"][0]["state"]
    assert state["k"] == 5
    weights = {name: param.detach() for name, param in model.named_parameters()}
    torch.testing.assert_close(weights, fit(Counts, max_epochs=1).weights, rtol=1e-4, atol=1e-5)
    more = _plain_trainer(make(), num_ranks, 2)
    more.fit(Counts(), ckpt_path=tmp_path / "a.ckpt", weights_only=False)
    assert dict[Any, Any](more.optimizers[0].state)["k"] == 10


@pytest.mark.slow
def test_a_count_is_in_a_folder_and_comes_back(tmp_path: Any) -> None:
    """It was left out where a folder is read, and the count began anew."""
    for num_epochs in (1, 2):
        strategy = lightning_shard.ZeRO3Strategy(backend="in_process", checkpoint_format="sharded")
        trainer = _plain_trainer(strategy, 2, num_epochs)
        path = tmp_path / "a.ckpt" if num_epochs == 2 else None
        trainer.fit(Counts(), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert dict[Any, Any](trainer.optimizers[0].state)["k"] == 10


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", ["zero1", "zero2"])
def test_a_step_that_moves_weights_before_its_closure(scheme: str) -> None:
    """It made its state of full weights, and then met shards."""
    style = style_with(lambda params: EarlySteps(params, 0.05))
    got = fit(style, SCHEMES[scheme][1](), devices=2, max_epochs=1)
    expected = fit(style, max_epochs=1)
    torch.testing.assert_close(got.weights, expected.weights, rtol=1e-4, atol=1e-6)


def test_a_wrapper_that_calls_no_constructor_of_torch_trains_where_nothing_is_cut() -> None:
    """`_optimizer_state_dict_pre_hooks` was missing in it; where state is cut, it is refused."""
    style = style_with(lambda params: OfOwnForm(SGD(params, lr=0.1, momentum=0.9)))
    got = fit(style, SCHEMES["shard_ddp"][1](), devices=2, max_epochs=1)
    torch.testing.assert_close(got.weights, fit(style, max_epochs=1).weights)
    with pytest.raises(ConfigError, match=r"OfOwnForm.state_dict\(\) has a form of its own"):
        fit(style, SCHEMES["zero2"][1](), devices=2, max_epochs=1)
