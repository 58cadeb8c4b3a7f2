"""Clipping of gradients of which a compressor keeps something: before they are sent."""

from collections.abc import Sequence
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import DDPStrategy, ZeRO1Strategy, ZeRO2Strategy
from lightning_shard.data_parallel.compression import Codec, Int8, OneBit, PowerSGD, TopK
from tests.fabric.loops import fabric_of, strategy_of
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring()

LIMIT = 0.1
STEPS, SPIKE = 14, 9


class Lossless(Codec):
    """Keeps what encoding has lost, which is nothing."""

    error_feedback = True

    def encode(self, values: Tensor, turn: Any) -> Sequence[Tensor]:
        return (values,)

    def decode(self, fields: Sequence[Tensor], numel: int) -> Tensor:
        return fields[0].clone()


COMPRESSORS: dict[str, Any] = {
    "onebit": OneBit(warmup_steps=6),
    "onebit of gradients": OneBit(warmup_steps=6, adam=False),
    "topk": TopK(ratio=0.2),
    "topk with momentum": TopK(ratio=0.2, momentum=0.9),
    "topk of adam's momentum": TopK(ratio=0.2, warmup_steps=6, adam=True),
    "powersgd": PowerSGD(rank=1),
    "powersgd of adam": PowerSGD(rank=1, warmup_steps=6, adam=True),
    "int8": Int8(),
}
SCHEMES: dict[str, Any] = {"ddp": DDPStrategy, "zero1": ZeRO1Strategy, "zero2": ZeRO2Strategy}


class Spiking(L.LightningModule):
    """A loss with one spike, which clipping is for."""

    def __init__(self, optimizer: str = "adam", spike: float = 1e4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.optimizer, self.spike = optimizer, spike
        self.norms: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.network(batch[0]), batch[1])
        return loss * (self.spike if self.global_step == SPIKE else 1.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(sum(p.grad.square().sum() for p in self.parameters())) ** 0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.1)


class InTheHook(Spiking):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, LIMIT, "norm")


class ByHand(Spiking):
    def __init__(self) -> None:
        super().__init__("sgd")
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, LIMIT, "norm")
        optimizer.step()


def fit(module: Spiking, strategy: Any, devices: int = 2, **more: Any) -> Tensor:
    defaults = {"accumulate_grad_batches": 1, "gradient_clip_val": LIMIT, "max_steps": STEPS}
    trainer = quiet_trainer(strategy=strategy, devices=devices, **(defaults | more))
    x = torch.randn(16 * STEPS, 8, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, torch.sin(x[:, :4] * 2))
    trainer.fit(module, DataLoader(dataset, batch_size=8))
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_a_spike_is_cut_off(compressor: str, scheme: str) -> None:
    """What was clipped was the momentum or what was left of the spike, which stayed for good."""
    optimizer = "adam" if "adam" in compressor or compressor == "onebit" else "sgd"
    module = Spiking(optimizer)
    strategy = SCHEMES[scheme](backend="in_process", compression=COMPRESSORS[compressor])
    fit(module, strategy)
    assert len(module.norms) == STEPS
    if compressor != "int8":  # of which nothing is kept: hooks see the average itself
        assert max(module.norms[SPIKE:]) < 20 * LIMIT
    assert max(module.norms[SPIKE + 1 :]) < 20 * LIMIT


@pytest.mark.parametrize("make", [InTheHook, ByHand])
def test_other_ways_to_clip(make: type[Spiking]) -> None:
    module = make() if make is ByHand else make("sgd")
    strategy = DDPStrategy(backend="in_process", compression=TopK(ratio=0.2))
    fit(module, strategy, gradient_clip_val=None)
    assert max(module.norms[SPIKE + 1 :]) < 20 * LIMIT


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_of_equal_samples_train_as_one_device(scheme: str, algorithm: str) -> None:
    more = {"gradient_clip_algorithm": algorithm}
    expected = fit(Spiking(), "auto", devices=1, **more)
    strategy = SCHEMES[scheme](backend="in_process", compression=Lossless())
    got = fit(Spiking(), strategy, use_distributed_sampler=False, **more)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


class NowAndThen(Spiking):
    """Clips every third step only."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if self.global_step % 3 == 0:
            self.clip_gradients(optimizer, LIMIT, "norm")


def test_where_some_steps_are_clipped_the_others_stay_whole() -> None:
    """All that can be known before a step is what the last ones have done."""
    module = NowAndThen("sgd", 1.0)
    strategy = ZeRO1Strategy(backend="in_process", compression=Lossless())
    with pytest.warns(UserWarning, match="A step was taken without clip_gradients after steps"):
        fit(module, strategy, use_distributed_sampler=False)
    assert module.norms[1] < LIMIT
    assert min(module.norms[2:]) > 2 * LIMIT


class Rivals(ByHand):
    """Clips the gradients of one of two optimizers."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for number, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type, var-annotated]
            self.toggle_optimizer(optimizer)
            self.manual_backward(F.mse_loss(self.network(batch[0]), batch[1]))
            if number:
                self.clip_gradients(optimizer, LIMIT, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        return

    def configure_optimizers(self) -> Any:
        layers = self.network[0], self.network[2]
        return [torch.optim.SGD(one.parameters(), lr=0.1) for one in layers]


def test_the_gradients_of_another_optimizer_stay_whole() -> None:
    expected = fit(Rivals(), "auto", devices=1, gradient_clip_val=None)
    strategy = ZeRO1Strategy(backend="in_process", compression=Lossless())
    got = fit(Rivals(), strategy, use_distributed_sampler=False, gradient_clip_val=None)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_under_fabric_too() -> None:
    norms: list[float] = []

    def train(fabric: Any) -> None:
        module = Spiking("sgd")
        model, optimizer = fabric.setup(module.network, module.configure_optimizers())
        generator = torch.Generator().manual_seed(fabric.global_rank)
        for number in range(STEPS):
            x = torch.randn(4, 8, generator=generator)
            loss = F.mse_loss(model(x), torch.sin(x[:, :4] * 2))
            fabric.backward(loss * (1e4 if number == SPIKE else 1.0))
            norm = fabric.clip_gradients(model, optimizer, max_norm=LIMIT)
            if fabric.global_rank == 0:
                norms.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()

    fabric_of(strategy_of("shard_ddp", compression=TopK(ratio=0.2))).launch(train)
    assert max(norms[SPIKE:]) < 20 * LIMIT
