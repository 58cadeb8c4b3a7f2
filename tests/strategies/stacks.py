"""Small networks of four blocks, and fits of them on one device and on the stages of a pipeline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import PipelineParallelStrategy
from tests.strategies.parity import Curve, quiet_trainer

WIDTH = 8
BATCH = 12
NUM_BATCHES = 5
# Ranks and schedule: halves and two stages a rank; whole backwards and one stage a rank.
PIPELINES = [(2, "zbv"), pytest.param(2, "1f1b", marks=pytest.mark.slow)]
OTHER_PIPELINES = [
    pytest.param(*one, marks=pytest.mark.slow)
    for one in ((4, "gpipe"), (2, "interleaved_zero_bubble"), (2, "looped_bfs"))
]
ALL_PIPELINES = [*PIPELINES, *OTHER_PIPELINES]


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(self.norm(x)))


class UpAndDown(nn.Module):
    """A residual pair of layers, which tensor parallel splits."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(x)))


class Stack(L.LightningModule):
    """Embedding, four blocks and a head."""

    options: ClassVar[dict[str, Any]] = {}
    block: ClassVar[type[nn.Module]] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        params = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def dataset(self) -> Any:
        return TensorDataset(*samples())

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset(), batch_size=BATCH)

    def callbacks(self) -> list[Callback]:
        return []


class ByHand(Stack):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def samples(num: int = BATCH * NUM_BATCHES, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return inputs (num, 4) and classes (num,)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 4, generator=generator), torch.randint(3, (num,), generator=generator)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A module after its fit."""

    model: Any
    trainer: L.Trainer
    curve: Curve

    @property
    def weights(self) -> dict[str, Tensor]:
        """The full state."""
        return dict(self.model.state_dict())


def pipeline(num_ranks: int, schedule: str, **options: Any) -> PipelineParallelStrategy:
    """Return the strategy, on ranks of this process."""
    return PipelineParallelStrategy(
        backend="in_process", num_ranks=num_ranks, schedule=schedule, **options
    )


def trainer_of(strategy: Any = "auto", **options: Any) -> L.Trainer:
    """Return a trainer of one device, or of the strategy's ranks."""
    defaults = {"max_steps": -1, "max_epochs": 2, "accumulate_grad_batches": 1}
    others = {"gradient_clip_val": None, "use_distributed_sampler": False}
    return quiet_trainer(strategy=strategy, **(defaults | others | options))


def fit(
    style: type[Stack], strategy: Any = "auto", callbacks: Sequence[Callback] = (), **options: Any
) -> Fitted:
    """Fit a style, from the same values every time."""
    torch.manual_seed(0)
    model, curve = style(), Curve()
    trainer = trainer_of(
        strategy, callbacks=[curve, *model.callbacks(), *callbacks], **(style.options | options)
    )
    trainer.fit(model)
    return Fitted(model=model, trainer=trainer, curve=curve)


def fit_with(
    style: type[Stack], callback: Callback, num_ranks: int, schedule: str, **options: Any
) -> Fitted:
    """Fit a style on stages, with a callback more."""

    class WithCallback(style):  # type: ignore[valid-type,misc]
        def callbacks(self) -> list[Callback]:
            return [callback]

    return fit(WithCallback, pipeline(num_ranks, schedule), **options)


class OfEveryRank(Callback):
    """Gathers what the ranks' modules have kept in `seen`."""

    def __init__(self) -> None:
        self.ranks: list[Any] = []

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        strategy = trainer.strategy
        gathered = hasattr(strategy, "collectives")
        self.ranks = strategy.collectives.all_gather_object(pl_module.seen) if gathered else []


def check(style: type[Stack], num_ranks: int, schedule: str, **options: Any) -> tuple[Fitted, ...]:
    """Compare a fit on stages with a single device's: losses, norms, weights and what is logged."""
    alone, staged = fit(style), fit(style, pipeline(num_ranks, schedule, **options))
    torch.testing.assert_close(staged.curve.losses, alone.curve.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(staged.curve.norms, alone.curve.norms, rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(staged.weights, alone.weights, rtol=1e-5, atol=2e-7)
    torch.testing.assert_close(
        dict(staged.trainer.callback_metrics), dict(alone.trainer.callback_metrics)
    )
    return alone, staged
