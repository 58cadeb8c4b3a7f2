"""Small engines whose state is lost and recovered: trained for a few steps, cut, compared."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.optimizer_state import full_state_dict, local_state_dict
from lightning_shard.checkpoint.rank_snapshot import Snapshot, take
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import DTypePolicy, EngineOptions
from lightning_shard.elastic.snapshot_memory import BuddyRing
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: optim.AdamW(p, lr=0.05),
    "fused AdamW": lambda p: optim.AdamW(p, lr=0.05, fused=True),
    "SGD": lambda p: optim.SGD(p, lr=0.05, momentum=0.9),
    "NAdam": lambda p: optim.NAdam(p, lr=0.05),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.05),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and how."""

    stage: int
    optimizer: str = "AdamW"
    compute: torch.dtype | None = None
    params: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank's model, optimizer and engine."""

    model: nn.Module
    optimizer: Optimizer
    sharded: ShardedOptimizer
    engine: DataParallelEngine
    collectives: Collectives
    setting: Setting

    def train(self, first: int, last: int) -> None:
        """Take the optimizer steps `first` to `last`; each depends on its number and this rank."""
        for step in range(first, last):
            self.optimizer.zero_grad()
            x = torch.linspace(-1, 1, 12).view(4, 3) + 0.1 * step + self.collectives.rank
            with self.engine.step(), self._autocast():
                loss = self.model(x.to(self.setting.params)).square().mean()
            with self.engine.backward():
                loss.backward()
            self.optimizer.step()
            self.optimizer.param_groups[0]["lr"] *= 0.9
        self.optimizer.zero_grad()

    def _autocast(self) -> torch.autocast:
        compute = self.setting.compute
        return torch.autocast("cpu", dtype=compute, enabled=compute is not None)

    def snapshot(self, step: int, **kept: Any) -> Snapshot:
        return take(self.engine, [self.optimizer], step=step, **kept)

    def full(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The full parameters and optimizer state, on rank 0; each rank must call."""
        names = {param: name for name, param in self.model.named_parameters()}
        values = {names[param]: value.clone() for param, value in self.engine.full_values.each()}
        return values, full_state_dict(self.optimizer, self.engine)


class Layers(nn.Sequential):
    """Repeated blocks, a frozen parameter, and one that no step uses."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(3, 7),
            nn.Sequential(*(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))),
            nn.Linear(7, 1),
        )
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0, 5.0]), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))


def start(setting: Setting, *, seed: int = 0) -> Rank:
    """Make a rank; each rank must call."""
    torch.manual_seed(seed)
    model = Layers().to(setting.params)
    return attach(setting, model, OPTIMIZERS[setting.optimizer](model.parameters()))


def attach(
    setting: Setting, model: nn.Module, optimizer: Optimizer, *, bucket_mb: float = 1e-6
) -> Rank:
    """Build an engine over all ranks; each must call."""
    collectives = all_ranks()
    options = EngineOptions(
        stage=setting.stage, dtypes=DTypePolicy(compute=setting.compute), bucket_mb=bucket_mb
    )
    engine = DataParallelEngine(model, collectives, options)
    return Rank(
        model=model,
        optimizer=optimizer,
        sharded=ShardedOptimizer(optimizer, engine),
        engine=engine,
        collectives=collectives,
        setting=setting,
    )


def load(
    setting: Setting, full: tuple[dict[str, Tensor], dict[str, Any]], *, seed: int = 0
) -> Rank:
    """Make a rank from full parameters and optimizer state; each rank must call."""
    torch.manual_seed(seed)
    model = Layers().to(setting.params)
    values, state = deepcopy(full)  # ranks of this process share it
    model.load_state_dict(values)
    rank = attach(setting, model, OPTIMIZERS[setting.optimizer](model.parameters()))
    with rank.engine.optimizer_view():
        rank.optimizer.load_state_dict(local_state_dict(state, rank.optimizer, rank.engine))
    return rank


def run_to(
    setting: Setting, num_ranks: int, num_steps: int, stride: int = 1
) -> tuple[list[list[Snapshot]], tuple[dict[str, Tensor], dict[str, Any]]]:
    """Train; return what each rank holds afterwards, and the full state."""

    def fn(index: int) -> tuple[list[Snapshot], Any]:
        rank = start(setting, seed=7)
        ring = BuddyRing(rank.collectives.duplicate(), stride)
        rank.train(0, num_steps)
        extra = f"rank {index} at {num_steps}".encode()
        ring.begin(rank.snapshot(num_steps, extra=extra, owner=f"member {index}"))
        ring.finish()
        return ring.held, rank.full()

    results = [result for result in run_ranks(fn, num_ranks) if result is not None]
    return [held for held, _ in results], results[0][1]


def assert_same(got: Any, expected: Any) -> None:
    """Raise unless all tensors are the same bit for bit."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def survivors(
    held: Sequence[list[Snapshot]], lost: Sequence[int], num_new: int
) -> list[list[Snapshot]]:
    """What the ranks of the next generation hold."""
    return [one for rank, one in enumerate(held) if rank not in lost] + [[]] * num_new
