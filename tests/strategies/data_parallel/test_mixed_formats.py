"""Under the mixed flags user code sees, edits, copies and averages fp32, as on one device.

Where nothing is trained (a learning rate of 0), what hooks write is known exactly, and what was
rounded to 16 bits anywhere would show: a factor of 0.999 moves nothing in bfloat16.
"""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from lightning_shard import ZeRO3Strategy
from lightning_shard.data_parallel.units.unit import Digits
from tests.strategies.models import Trained
from tests.strategies.parity import SMALL_BUCKET_MB, Curve, GlobalBatches, ignoring, quiet_trainer

pytestmark = ignoring()

STEPS, DECAY = 4, 0.999
SCHEMES = ["shard_ddp", "zero1", "zero2", "zero3", "tensor_parallel", "pipeline_parallel"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Net(Trained):
    """Blocks between a stem and a head."""

    rate = 0.0
    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(6, 3)
        self.formats: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate)

    def data(self, num_samples: int) -> TensorDataset:
        made = torch.Generator().manual_seed(1)
        x = torch.randn(num_samples, 6, generator=made)
        return TensorDataset(x, torch.randn(num_samples, 3, generator=made))


class Decayed(Net):
    """Its weights decay by hand, in a hook."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for param in self.parameters():
            self.formats.add(param.dtype)
            param.mul_(DECAY)
        for group in self.optimizers().param_groups:
            self.formats |= {param.dtype for param in group["params"]}
        self.formats |= {value.dtype for value in self.state_dict().values()}


class DecayedInStep(Net):
    """Its weights decay by hand, in the step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            for param in self.parameters():
                param.mul_(DECAY)
        return super().training_step(batch, batch_idx)


class Copied(Decayed):
    """A copy of what decays, made at the fit's begin, follows by an average."""

    def on_fit_start(self) -> None:
        self.kept = [copy.deepcopy(self.stem), copy.deepcopy(self.blocks[2])]

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        super().on_train_batch_end()
        for kept, own in zip(self.kept, (self.stem, self.blocks[2]), strict=True):
            for one, param in zip(kept.parameters(), own.parameters(), strict=True):
                one.lerp_(param, 0.01)

    def on_train_end(self) -> None:
        for kept, own in zip(self.kept, (self.stem, self.blocks[2]), strict=True):
            own.load_state_dict(kept.state_dict())


class Islands(Net):
    """An encoder and a router that compute outside autocast, and a weight that is used there."""

    rate = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.vae = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.SiLU(), nn.Conv1d(4, 1, 3))
        self.vae.requires_grad_(False)
        self.router = nn.Linear(6, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):
            with torch.no_grad():
                z = self.vae(batch[0].float()[:, None])[:, 0]
            routed = self.router(batch[0].float())
            used = F.linear(z, self.stem.weight[:3, :4].float())
        out = self(batch[0])
        assert routed.dtype == used.dtype == torch.float32
        return F.mse_loss(out + routed + used, batch[1])


class RoutedBlock(Block):
    """A block with a router that computes outside autocast, before and after its own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            routed = self.router(x.float())
            assert self.router.weight.dtype == routed.dtype == torch.float32
        return x + self.down(routed.sigmoid() @ self.up.weight.T)


class RoutedInBlocks(Net):
    """Routers in blocks; one block is called outside autocast, too, and one weight is penalised."""

    rate = 0.05
    block = RoutedBlock

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.autocast(self.device.type, enabled=False):
            again = self.blocks[1](batch[0].float())
            assert again.dtype == torch.float32
        return loss + again.square().mean() + self.blocks[3].up.weight.square().sum()

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():  # outside autocast
            self.formats.add(self(torch.ones(2, 6)).dtype)


def fit(
    kind: type[Net],
    strategy: str | ZeRO3Strategy | None = None,
    precision: str = "bf16-mixed",
    scale: float = 2.0**10,
    **options: Any,
) -> tuple[Net, list[float]]:
    torch.manual_seed(3)
    module, curve = kind(), Curve()
    ranks: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # the Trainer itself has no fp16 on the CPU
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        ranks = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    if strategy is not None:
        named = f"{strategy}_in_process" if isinstance(strategy, str) else strategy
        ranks |= {"strategy": named, "devices": 2}
    plain = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "callbacks": [curve]}
    trainer = quiet_trainer(max_steps=STEPS, **(plain | options | ranks))
    trainer.fit(module, datamodule=GlobalBatches(module, STEPS))
    return module, curve.losses


@cache
def one_device(kind: type[Net], precision: str = "bf16-mixed") -> tuple[Net, list[float]]:
    return fit(kind, precision=precision)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *((Decayed, name) for name in SCHEMES),
        *((Copied, name) for name in ("shard_ddp", "zero2", "zero3")),
        *(
            (DecayedInStep, name)
            for name in ("shard_ddp", "zero1", "zero2", "zero3", "tensor_parallel")
        ),
    ],
)
def test_what_hooks_and_steps_edit_is_not_rounded(
    kind: type[Net], strategy: str, precision: str
) -> None:
    """Matrices were in 16 bits there: decay by hand moved nothing, averages moved too much."""
    found, expected = fit(kind, strategy, precision)[0], one_device(kind, precision)[0]
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-6, atol=1e-8)
    if strategy != "pipeline_parallel":  # whose callbacks are rank 0's
        assert found.formats == expected.formats


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("strategy", ["shard_ddp", "zero2", "zero3"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_averages_of_callbacks_are_those_of_one_device(strategy: str, accumulate: int) -> None:
    """They are of fp32 weights, also where weights hardly move."""

    def ema() -> WeightAveraging:
        return WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.9))

    kept = {"accumulate_grad_batches": accumulate}
    found = fit(Decayed, strategy, callbacks=[ema()], **kept)[0]
    expected = fit(Decayed, callbacks=[ema()], **kept)[0]
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-6, atol=1e-8)


@pytest.mark.few_cases(3)
@pytest.mark.filterwarnings("ignore:A step uses . parameters? outside of their stage")
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *((Islands, name) for name in SCHEMES),
        *((RoutedInBlocks, name) for name in ("shard_ddp", "zero2", "zero3")),
    ],
)
def test_what_computes_outside_autocast_trains_as_on_one_device(
    kind: type[Net], strategy: str, precision: str
) -> None:
    """It raised torch's error of formats, or computed with rounded weights."""
    found, expected = fit(kind, strategy, precision)[1], one_device(kind, precision)[1]
    assert found == pytest.approx(expected, rel=4e-3)  # bfloat16 rounds to 2^-9


def test_only_what_a_step_computes_outside_autocast_stays_unrounded_under_zero3() -> None:
    """A hook's call outside autocast leaves no block in fp32, which would take twice the memory."""

    class Called(RoutedInBlocks):
        block = Block

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            with torch.autocast(self.device.type, enabled=False):
                again = self.blocks[1](batch[0].float())
            return Net.training_step(self, batch, batch_idx) + again.square().mean()

        def on_train_end(self) -> None:
            if isinstance(self.trainer.strategy, ZeRO3Strategy):
                units = self.trainer.strategy.engine.units
                self.rounded = {unit.name: unit.digits is Digits.ROUNDED for unit in units}

    strategy = ZeRO3Strategy(backend="in_process", bucket_mb=SMALL_BUCKET_MB / 10)
    module, losses = fit(Called, strategy)
    assert losses == pytest.approx(one_device(Called)[1], rel=4e-3)
    assert [module.rounded[f"blocks.{index}"] for index in range(4)] == [True, False, True, True]


def test_a_scaled_loss_overflows_no_gradient_that_is_fp32_on_one_device() -> None:
    """Ranks left out steps: a gradient of an fp32 island, times the scale, was sent in float16."""

    class Steep(Net):
        rate = 1e-6

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            with torch.autocast(self.device.type, enabled=False):
                return 30 * self.stem(batch[0]).mean(0).sum()  # gradients above 1

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            grad = self.stem.weight.grad
            self.formats.add(grad.dtype)
            assert grad.isfinite().all()

    moved: Callable[[Net], Tensor] = lambda net: net.stem.weight.detach()  # noqa: E731
    for strategy in ("shard_ddp", "zero2"):
        found = fit(Steep, strategy, "16-mixed", 2.0**16)[0]
        expected = fit(Steep, None, "16-mixed", 2.0**16)[0]
        torch.testing.assert_close(moved(found), moved(expected), rtol=1e-6, atol=1e-8)
