"""A strategy's description of itself for a dry run: its ranks, options, and a model's cuts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from torch import nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.mesh import Axis, ParallelMesh
from lightning_shard.data_parallel.model_split import ModelSplit, Unsplit
from lightning_shard.data_parallel.options import EngineOptions, Offload
from lightning_shard.pipeline_parallel.blocks import BlockList
from lightning_shard.pipeline_parallel.partition import BlockCosts, Partition
from lightning_shard.pipeline_parallel.schedules import Schedule
from lightning_shard.tensor_parallel.plan import PlannedLayer

Measure = Callable[[BlockList, Literal["flops", "memory"]], BlockCosts]
"""Returns the costs of the simulated module's blocks in a training step."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What a rank has of a simulated model that the ranks along an axis share.

    `forget` lets go of activations that layers keep between two calls.
    """

    split: ModelSplit = field(default_factory=Unsplit)
    forget: Callable[[], None] = lambda: None


class SharedModel(Protocol):
    """What ranks along an axis share of a model; see `strategies.dimensions.dimension`."""

    axis: ClassVar[Axis]
    averages_gradients: ClassVar[bool]
    has_own_samples: ClassVar[bool]

    def simulated(self, model: nn.Module, found: "Description", group: Collectives) -> Simulated:
        """Change a model without elements as on the first rank of a simulated group."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A strategy's options on a simulated world.

    Attributes:
        shard_size: Number of data-parallel ranks that shard one copy of the state.
        dimensions: What ranks share of a model, the one that splits it first before the others.
        layers: Layers that tensor parallelism splits.
        cut: Cuts a model, whose layers are split, into stages; None without a pipeline.
        stage_ranks: Pipeline rank of each stage.
        schedule: Makes the pipeline's schedule for a number of microbatches.
        offload: What lies in host memory: see `EngineOptions`, of which `engine` has none.
    """

    mesh: ParallelMesh
    engine: EngineOptions
    shard_size: int
    dimensions: Sequence[SharedModel] = ()
    layers: Sequence[PlannedLayer] = ()
    cut: Callable[[nn.Module], Partition] | None = None
    stage_ranks: tuple[int, ...] = (0,)
    schedule: Callable[[int], Schedule] | None = None
    num_microbatches: int = 1
    offload: Offload | None = None

    @property
    def num_averaging(self) -> int:
        """Number of ranks that average gradients."""
        return self.mesh.size(
            "dp", *(one.axis for one in self.dimensions if one.averages_gradients)
        )

    @property
    def num_with_samples(self) -> int:
        """Number of ranks that are given different samples."""
        return self.mesh.size("dp", *(one.axis for one in self.dimensions if one.has_own_samples))


Step = Callable[[nn.Module, Any], Any]
"""Runs the user's training step of a module on the content of a microbatch."""


@dataclass(frozen=True, kw_only=True)
class WorldOptions(Description):
    """The options that all ranks of a simulated world have in common."""

    step: Step
    state_values: float
