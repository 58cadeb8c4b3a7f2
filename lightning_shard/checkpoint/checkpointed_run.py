"""What the parts that save and load ask of a run: a strategy is one, and they know no other."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.mesh import ParallelMesh


class CheckpointedRun(Protocol):
    """One rank's view of a run whose state is saved and loaded."""

    @property
    def lightning_module(self) -> nn.Module | None:
        """The module that the run is of."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of the module, with shards while there is an engine."""

    @property
    def present_engine(self) -> DataParallelEngine | None:
        """The engine; None before the strategy's setup and after teardown."""

    @property
    def present_collectives(self) -> Collectives | None:
        """The group of all ranks; None where this rank asks nobody."""

    @property
    def mesh(self) -> ParallelMesh:
        """The grid of the run's ranks."""

    @property
    def mesh_rank(self) -> int:
        """Number of this rank in the mesh."""

    @property
    def mesh_size(self) -> int:
        """Number of ranks."""

    @property
    def root_device(self) -> torch.device:
        """Device of this rank."""
