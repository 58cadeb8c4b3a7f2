"""A strategy's description of itself for a dry run: its ranks, options, and a model's cuts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from lightning_shard.core.mesh import ParallelMesh
from lightning_shard.data_parallel.options import EngineOptions, Offload
from lightning_shard.pipeline_parallel.blocks import BlockList
from lightning_shard.pipeline_parallel.partition import BlockCosts, Partition
from lightning_shard.pipeline_parallel.schedules import Schedule
from lightning_shard.tensor_parallel.plan import PlannedLayer

Measure = Callable[[BlockList, Literal["flops", "memory"]], BlockCosts]
"""Returns the costs of the simulated module's blocks in a training step."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A strategy's options on a simulated world.

    Attributes:
        mesh: Grid of the simulated ranks.
        engine: Options of the data-parallel engine.
        shard_size: Number of data-parallel ranks that shard one copy of the state.
        layers: Layers that tensor parallelism splits.
        sequence_parallel: Whether activations between split layers are in slices.
        cut: Cuts a model, whose layers are split, into stages; None without a pipeline.
        stage_ranks: Pipeline rank of each stage.
        schedule: Makes the pipeline's schedule for a number of microbatches; None without a
            pipeline.
        num_microbatches: Number of microbatches of a batch.
        offload: What lies in host memory: see `EngineOptions`, of which `engine` has none.
    """

    mesh: ParallelMesh
    engine: EngineOptions
    shard_size: int
    layers: Sequence[PlannedLayer] = ()
    sequence_parallel: bool = False
    cut: Callable[[nn.Module], Partition] | None = None
    stage_ranks: tuple[int, ...] = (0,)
    schedule: Callable[[int], Schedule] | None = None
    num_microbatches: int = 1
    offload: Offload | None = None


Step = Callable[[nn.Module, Any], Any]
"""Runs the user's training step of a module on the content of a microbatch."""


@dataclass(frozen=True, kw_only=True)
class WorldOptions(Description):
    """The options that all ranks of a simulated world have in common.

    Attributes:
        step: Runs the training step.
        state_values: Number of values that the optimizer keeps for each trained element.
    """

    step: Step
    state_values: int
