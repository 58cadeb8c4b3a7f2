"""What an elastic run asks of the strategy that trains: the engine taken down, and made anew.

    drop_generation ─> join_generation(the next one) ─> rebuild_engine ─> values are moved into it

`ElasticRun` and its parts know a strategy by this alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.elastic.data_assignment import DataAssignment
from lightning_shard.elastic.hook_values import HookValues
from lightning_shard.elastic.membership.generation import Generation
from lightning_shard.elastic.membership.ranks import ElasticRanks

T = TypeVar("T")


class Reconfigurable(Protocol):
    """A strategy whose ranks may change during a fit."""

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""

    @property
    def collectives(self) -> Collectives:
        """Collectives over all ranks of the present generation."""

    @property
    def engine(self) -> DataParallelEngine:
        """The engine of the present generation."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of the fit, which stay the same objects."""

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return rank `src`'s object; each rank must call."""

    def drop_generation(self) -> None:
        """Leave the engine and the groups as they are, broken or not; not collective."""

    def join_generation(self, generation: Generation) -> None:
        """Make the groups of a generation; each of its members must call."""

    def rebuild_engine(self) -> None:
        """Make the engine at the present generation's size, without values; each rank must call."""

    def end_training(self) -> None:
        """Make the module full again after the last step; each rank must call."""

    def finish_save(self) -> None:
        """Wait until a save in the background is complete; each rank must call."""


@dataclass(frozen=True, kw_only=True)
class ElasticFit:
    """What the parts of an elastic run share.

    Attributes:
        max_failures: How often the same ranks may reconfigure at the same step.
        timeout: How long a rank waits for its buddy.
        buddy_stride: How far away a rank's buddy is: the ranks per host on several hosts, else 1.
    """

    strategy: Reconfigurable
    trainer: "pl.Trainer"
    ranks: ElasticRanks
    data_assignment: DataAssignment
    hook_values: HookValues
    snapshot_every: int
    max_failures: int
    timeout: timedelta
    buddy_stride: int
