"""Ways of training, each against a single device on the same global batch, without Lightning.

A case is a model, a loss and an update; `train` runs it on one device (no engine) or on ranks. The
losses, averaged over the ranks, and the final weights must agree.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from lightning_shard.backends.registry import get_backend
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.optim.clipping import clip_grad_norm
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks

GLOBAL_BATCH = 12
NUM_STEPS = 4
SMALL_BUCKET_MB = 1e-4  # no two blocks are joined


class Session:
    """What an update may use: the same calls with and without an engine."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, engine: DataParallelEngine | None = None
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.engine = engine

    def step(self) -> AbstractContextManager[None]:
        return self.engine.step() if self.engine else nullcontext()

    def no_sync(self) -> AbstractContextManager[None]:
        return self.engine.no_sync() if self.engine else nullcontext()

    def backward(self, loss: Tensor, **options: Any) -> None:
        with self.engine.backward() if self.engine else nullcontext():
            loss.backward(**options)

    def clip(self, max_norm: float) -> Tensor:
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        if self.engine is None:
            return nn.utils.clip_grad_norm_(params, max_norm)
        return clip_grad_norm(params, max_norm, self.engine)


Loss = Callable[[nn.Module, Tensor], Tensor]


def automatic(session: Session, loss: Loss, batch: Tensor) -> Tensor:
    """Update as Lightning does: training_step, zero_grad, backward, step."""
    with session.step():
        value = loss(session.model, batch)
    session.optimizer.zero_grad()
    session.backward(value)
    session.optimizer.step()
    return value


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(GLOBAL_BATCH, 4, generator=generator) for _ in range(NUM_STEPS)]


def batches_marked_for_rank_one() -> list[Tensor]:
    """Batches in which two samples are marked, both rank 1's whether of two or of three ranks."""
    data = batches()
    for batch in data:
        batch[:, 3] = 0.0
        batch[1::6, 3] = 1.0
    return data


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way of training.

    Attributes:
        model: Called with a seed set.
        loss: From the model and this rank's batch, shape (B, 4); a mean over it.
        update: One whole step, which returns the loss.
        optimizer: On the model.
        data: The global batches.
    """

    model: Callable[[], nn.Module]
    loss: Loss = mean_square
    update: Callable[[Session, Loss, Tensor], Tensor] = automatic
    optimizer: Callable[[nn.Module], Optimizer] = sgd
    data: Callable[[], list[Tensor]] = batches


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    weights: dict[str, Tensor]


def train_alone(case: Case) -> Trained:
    """Train on one device."""
    torch.manual_seed(0)
    model = case.model()
    session = Session(model, case.optimizer(model))
    losses = [case.update(session, case.loss, batch).item() for batch in case.data()]
    return Trained(losses, _weights(model))


def train_on_ranks(
    case: Case, stage: int, num_ranks: int, bucket_mb: float = SMALL_BUCKET_MB
) -> Trained:
    """Train on ranks; returns rank 0's result after checking that all ranks agree."""

    def fn(rank: int) -> Trained:
        torch.manual_seed(0)
        model = case.model()
        optimizer = case.optimizer(model)
        assert dist.group.WORLD is not None
        collectives = get_backend("in_process").collectives(dist.group.WORLD)
        engine = DataParallelEngine(
            model, collectives, EngineOptions(stage=stage, bucket_mb=bucket_mb)
        )
        sharded = ShardedOptimizer(optimizer, engine)
        session = Session(model, optimizer, engine)
        losses = []
        for batch in case.data():
            loss = case.update(session, case.loss, batch[rank::num_ranks]).detach().clone()
            collectives.all_reduce(loss, "avg").wait()
            losses.append(loss.item())
        engine.detach(restore=True)
        sharded.detach()
        return Trained(losses, _weights(model))

    first, *others = (result for result in run_ranks(fn, num_ranks) if result is not None)
    for other in others:
        torch.testing.assert_close(other.weights, first.weights, rtol=0, atol=0)
    return first


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def check(case: Case, stage: int, num_ranks: int, bucket_mb: float = SMALL_BUCKET_MB) -> None:
    """Compare ranks with one device."""
    alone, together = train_alone(case), train_on_ranks(case, stage, num_ranks, bucket_mb)
    torch.testing.assert_close(together.losses, alone.losses, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(together.weights, alone.weights, rtol=1e-4, atol=1e-6)


# --- models ----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, three blocks and a head; subclasses change how blocks are called."""

    block: Callable[[], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([type(self).block() for _ in range(3)])
        self.head = nn.Linear(8, 3)

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


def net_that_calls(
    how: Callable[[nn.Module, Tensor], Tensor], block: type[nn.Module] = Block
) -> type[Net]:
    """Return a Net whose blocks are called as told."""
    return type("CustomNet", (Net,), {"call": lambda self, b, x: how(b, x), "block": block})
