"""Compression where a step uses some parameters only: nothing is lost, nothing is counted twice.

The losses are linear, so a weight's gradients are constant and SGD with a learning rate of 1 tells
how much of them has arrived: what was applied and what is kept back must add up.
"""

from collections.abc import Callable, Sequence
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import ZeRO1Strategy
from lightning_shard.data_parallel.compression import Compressor, OneBit, PowerSGD, TopK
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from tests.checkpoint.saved_sections import compression_in
from tests.data_parallel.compression.buffers import state_of
from tests.strategies.parity import STRATEGIES, ignoring, quiet_trainer

pytestmark = ignoring()

STAGES = ("shard_ddp", "zero1", "zero2")
LOSSY: dict[str, Callable[[], Compressor]] = {
    "topk": lambda: TopK(ratio=0.1),
    "onebit": lambda: OneBit(warmup_steps=0, adam=False),
    "powersgd": lambda: PowerSGD(rank=1),
}
SHAPE = (40, 40)


class Linear(L.LightningModule):
    """Two matrices `a` and `b`, each with a constant gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(SHAPE)) for _ in range(2))
        slopes = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
        self.register_buffer("slopes", slopes)
        self.seen: dict[str, Any] = {}

    def loss(self, weight: Tensor) -> Tensor:
        return (weight * self.slopes).sum()

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Use `b` in every second step."""
        return self.loss(self.a) + (self.loss(self.b) if batch_idx % 2 else self.a.sum() * 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(400, 1)), batch_size=1)

    def on_train_end(self) -> None:
        states = [state_of(one) for one in self.trainer.strategy.engine.exchanges]
        self.seen["kept"] = {
            name: value for one in states for name, value in one.get("residual", {}).items()
        }
        self.seen["moments"] = [
            optimizer.state[param].get("exp_avg", torch.zeros(1)).mean().item()
            for optimizer in self.trainer.optimizers
            for group in optimizer.param_groups
            for param in group["params"]
            if optimizer.state.get(param)
        ]

    def lost(self, name: str, num_gradients: int) -> Tensor:
        """What has neither been applied nor kept back."""
        return num_gradients * self.slopes + getattr(self, name).detach() - self.seen["kept"][name]


class ByTurns(Linear):
    """An optimizer for each matrix, which zeroes gradients before its own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for optimizer, weight in zip(self.optimizers(), (self.a, self.b), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(weight))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([weight], lr=1.0) for weight in (self.a, self.b)]


class Adversaries(ByTurns):
    """The same with Adam, whose average of constant gradients is that gradient."""

    def loss(self, weight: Tensor) -> Tensor:
        return weight.sum()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam([weight], lr=1e-3) for weight in (self.a, self.b)]


def fit(model: Linear, stage: str, compressor: Compressor | None, num_steps: int) -> Linear:
    strategy = STRATEGIES[stage](backend="in_process", compression=compressor)
    trainer_of(strategy, num_steps).fit(model)
    return model


def trainer_of(strategy: DataParallelStrategy, num_steps: int) -> L.Trainer:
    options = {"gradient_clip_val": None, "accumulate_grad_batches": 1, "limit_val_batches": 1}
    return quiet_trainer(strategy=strategy, devices=2, max_steps=num_steps, **options)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", LOSSY)
def test_what_no_rank_used_in_a_step_is_not_lost(name: str, stage: str) -> None:
    """What no rank used in a step was sent and thrown away."""
    model = fit(Linear(), stage, LOSSY[name](), 20)
    for weight, num_gradients in (("a", 20), ("b", 10)):
        lost = model.lost(weight, num_gradients)
        torch.testing.assert_close(lost, torch.zeros(SHAPE), rtol=0, atol=2e-4)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", STAGES)
def test_the_old_average_of_another_optimizer_does_not_travel_again(stage: str) -> None:
    """The old average of another optimizer travelled again."""
    model = fit(ByTurns(), stage, TopK(ratio=0.1), 40)
    for weight in ("a", "b"):
        torch.testing.assert_close(model.lost(weight, 20), torch.zeros(SHAPE), rtol=0, atol=2e-4)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_of_one_optimizer_leaves_the_momentum_of_another(stage: str) -> None:
    """A step of one optimizer made the momentum of another smaller."""
    exact = fit(Adversaries(), stage, None, 60)
    model = fit(Adversaries(), stage, OneBit(warmup_steps=40), 60)
    assert model.seen["moments"]
    assert model.seen["moments"] == pytest.approx(exact.seen["moments"], rel=1e-4)


def test_each_group_has_its_own_momentum() -> None:
    """One group had the momentum of another."""

    class TwoBetas(Linear):
        def loss(self, weight: Tensor) -> Tensor:
            return weight.sum()

        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            sign = 1.0 if batch_idx < 20 else -1.0
            return sign * (self.loss(self.a) + self.loss(self.b))

        def configure_optimizers(self) -> Any:
            groups = [{"params": [self.a], "betas": (0.5, 0.999)}, {"params": [self.b]}]
            return torch.optim.Adam(groups, lr=1e-3)

    exact = fit(TwoBetas(), "shard_ddp", None, 24)
    model = fit(TwoBetas(), "shard_ddp", OneBit(warmup_steps=10), 24)
    assert exact.seen["moments"][0] < 0 < exact.seen["moments"][1]
    assert model.seen["moments"] == pytest.approx(exact.seen["moments"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "compressor",
    [
        OneBit(warmup_steps=5),
        TopK(ratio=0.2, warmup_steps=5, adam=True),
        PowerSGD(rank=8, warmup_steps=5, adam=True),
    ],
    ids=["onebit", "topk", "powersgd"],
)
def test_what_is_first_used_after_the_warm_up_is_trained(compressor: Compressor) -> None:
    """What was first used after the warm up was never trained."""

    class Late(Linear):
        def loss(self, weight: Tensor) -> Tensor:
            return (weight - self.slopes).square().sum()

        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            rows = slice(0, 20) if batch_idx < 10 else slice(0, 40)
            loss = (self.a - self.slopes)[rows].square().sum()
            return loss if batch_idx < 10 else loss + self.loss(self.b)

        def configure_optimizers(self) -> Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    model = fit(Late(), "shard_ddp", compressor, 200)
    late = [(model.b, slice(None))]
    if not isinstance(compressor, OneBit):  # its signs are no use where there was no gradient
        late.append((model.a, slice(20, 40)))
    for weight, rows in late:
        target = model.slopes[rows]
        assert (weight.detach()[rows] != 0).double().mean() > 0.95
        assert (weight.detach()[rows] - target).square().mean() < 0.7 * target.square().mean()


@pytest.mark.parametrize(
    "compressor",
    [OneBit(warmup_steps=2), PowerSGD(warmup_steps=2, adam=True)],
    ids=["onebit", "powersgd"],
)
def test_micro_batches_by_hand_are_refused_where_a_momentum_is_sent(compressor: Compressor) -> None:
    """Micro-batches by hand counted as steps of the momentum."""

    class Twice(Adversaries):
        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()[0]
            optimizer.zero_grad()
            for _ in range(2):
                self.manual_backward(self.loss(self.a) + self.loss(self.b))
            optimizer.step()

    with pytest.raises(ConfigError, match=r"(?s)second gradient.*accumulate_grad_batches=n"):
        fit(Twice(), "zero1", compressor, 5)


@pytest.mark.parametrize("kind", ["topk", "powersgd"])
def test_a_frozen_part_paid_for_compression(kind: str) -> None:
    class Frozen(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.a.requires_grad_(False)

        def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
            return self.loss(self.b)

        def on_train_end(self) -> None:
            super().on_train_end()
            self.seen["gradients"] = self.trainer.strategy.held_bytes().gradients

    without = fit(Frozen(), "shard_ddp", None, 3)
    model = fit(Frozen(), "shard_ddp", LOSSY[kind](), 3)
    assert set(model.seen["kept"]) == {"b"}
    more = model.seen["gradients"] - without.seen["gradients"]
    assert 0 < more <= 2 * 4 * 1600 + 64  # a residual, and one of the own segment


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders")
def test_a_validation_after_the_fit_keeps_the_state_of_compression(tmp_path: Any) -> None:
    """A validation after the fit emptied the state of compression."""

    class Validated(Linear):
        def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
            pass

        def val_dataloader(self) -> DataLoader[Any]:
            return DataLoader(TensorDataset(torch.zeros(2, 1)))

    strategy = ZeRO1Strategy(backend="in_process", compression=TopK(ratio=0.1))
    trainer = trainer_of(strategy, 4)
    model = Validated()
    trainer.fit(model)
    tally = strategy.compression_tally()
    assert tally.sent_bytes > 0
    trainer.validate(model, verbose=False)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=False)
    kept = compression_in(saved["lightning_shard"])
    assert kept["step"] == {"a": 4, "b": 4}
    assert kept["residual"]["a"].abs().sum() > 0
    assert strategy.compression_tally() == tally
