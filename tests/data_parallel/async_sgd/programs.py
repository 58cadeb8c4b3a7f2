"""Asynchronous SGD without a Trainer, for the tests: ranks whose pace a test decides.

A rank of a cooperative world runs until it asks for messages or waits, so `let_others_run` makes it
slow by turns, not by time: the same run every time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.backends.in_process.world import current_world
from lightning_shard.data_parallel.async_sgd.async_sgd import AsyncEngine, AsyncSGD, Update
from lightning_shard.data_parallel.async_sgd.mailbox import mailbox_type
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from tests.groups import all_ranks


def let_others_run(turns: int) -> None:
    """Hand the token round so many times; in an in-process world."""
    world = current_world()
    assert world is not None
    for _ in range(turns):
        world.scheduler.yield_token(lambda: "a slow step")


@dataclass
class Event:
    """An update as an owner has applied it.

    Attributes:
        owner_step: Steps that the owner itself had taken.
    """

    ranks: list[int]
    owner_step: int


@dataclass
class Recording:
    """What one rank has seen.

    Attributes:
        held: At the start of each step, the version of each shard.
    """

    events: list[Event] = field(default_factory=list)
    held: list[list[list[int]]] = field(default_factory=list)


class RecordedSGD(AsyncSGD):
    """Keeps a recording."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.recording = Recording()

    def _own_update(self) -> Update:
        self.recording.held.append([list(version) for version in self._clocks.included])
        return super()._own_update()

    def _next_round(self) -> Update:
        before = list(self._clocks.own)
        update = super()._next_round()
        ranks = [r for r, count in enumerate(self._clocks.own) if count > before[r]]
        self.recording.events.append(Event(ranks, self.counters.steps))
        return update


@dataclass
class Worker:
    """One rank: model, optimizer, and its part in asynchronous SGD."""

    engine: AsyncEngine
    optimizer: torch.optim.Optimizer
    sgd: RecordedSGD
    sharded: ShardedOptimizer

    @classmethod
    def build(
        cls,
        model: nn.Module,
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
        *,
        bound: int,
        rule: str | None = "inverse",
        backend: str = "in_process",
    ) -> "Worker":
        """Make this rank's; each rank must call."""
        ranks = all_ranks(backend)
        engine = AsyncEngine(model, ranks, EngineOptions(stage=1))
        optimizer = make_optimizer(model.parameters())
        sharded = ShardedOptimizer(optimizer, engine)
        sgd = RecordedSGD(engine, optimizer, ranks.duplicate(), mailbox_type(backend), bound, rule)
        return cls(engine, optimizer, sgd, sharded)

    def step(
        self, loss: Callable[[], Tensor], before_update: Callable[[], object] | None = None
    ) -> None:
        """Take one step, as the strategy does."""
        self.optimizer.zero_grad()
        with self.engine.step():
            value = loss()
        with self.engine.backward():
            value.backward()
        if before_update is not None:
            before_update()
        self.sgd.before_step()
        self.optimizer.step()
        self.sgd.after_step()
