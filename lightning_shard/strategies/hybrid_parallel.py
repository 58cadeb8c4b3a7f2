"""Data, tensor and pipeline parallelism together: 3D, on one mesh."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Unpack

from typing_extensions import override

from lightning_shard.expert_parallel.load import ExpertLoad
from lightning_shard.mesh import NodePlacement, ParallelMesh
from lightning_shard.parallel_dimensions.context import ContextDimension
from lightning_shard.parallel_dimensions.experts import ExpertDimension
from lightning_shard.pipeline_parallel.pipeline import Pipeline
from lightning_shard.pipeline_parallel.schedules import Schedule
from lightning_shard.strategies.configs import (
    FitEndConfig,
    GradientConfig,
    HybridParallelConfig,
    PlanConfig,
    RunConfig,
    ScheduleConfig,
)
from lightning_shard.strategies.flat_options import part, takes
from lightning_shard.strategies.hybrid_sharding import shard_size, warning_of_unshards
from lightning_shard.strategies.model_parallel import ModelParallelStrategy
from lightning_shard.strategies.options import HybridParallelOptions, SplitOptions


class HybridParallelStrategy(ModelParallelStrategy):
    """Stages of split layers, and copies of them on other data; `strategy="hybrid_parallel"`.

    Raises:
        ConfigError: Sizes that do not fit the ranks, or what either of the two refuses.
    """

    @takes(
        RunConfig, HybridParallelConfig, PlanConfig, ScheduleConfig, GradientConfig, FitEndConfig
    )
    def __init__(self, **options: Unpack[HybridParallelOptions]) -> None:
        grid = HybridParallelConfig.of(options)
        layers = PlanConfig.of(options).dimension(grid.tensor_parallel_size)
        self._stages = ScheduleConfig.of(options).dimension(
            grid.pipeline_parallel_size,
            recomputes=options.get("activation_checkpointing") is not None,
        )
        sequences = ContextDimension(grid.context_parallel_size)
        self._experts = ExpertDimension(grid.expert_parallel_size)
        super().__init__(
            [layers, self._experts, sequences, self._stages],
            zero_stage=grid.zero_stage,
            **part(SplitOptions, options),
        )
        self._data_parallel_size = grid.data_parallel_size
        self._axis_order = grid.axis_order

    @property
    @override
    def mesh(self) -> ParallelMesh:
        dp = self._data_parallel_size if isinstance(self._data_parallel_size, int) else -1
        mesh = ParallelMesh.of_world(
            self.mesh_size, **self._sizes(), dp=dp, axis_order=self._axis_order
        )
        if isinstance(self._data_parallel_size, int) or self.stage == 0:
            return mesh
        return replace(mesh, shard=shard_size(self._data_parallel_size, mesh.dp))

    @property
    @override
    def shard_size(self) -> int:
        dp = self.mesh.dp  # a copy of the state is in shards on all that share its sequences
        return shard_size(self._data_parallel_size, dp) * (super().shard_size // dp)

    @override
    def placement(self, ranks_per_node: int) -> NodePlacement:
        mesh, found = self.mesh, super().placement(ranks_per_node)
        about = mesh.shard and warning_of_unshards(mesh, mesh.shard, ranks_per_node)
        return replace(found, warnings=(*found.warnings, about)) if about else found

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline; there from `setup` to `teardown`."""
        return self._stages.pipeline

    @property
    def num_microbatches(self) -> int:
        """Parts of a batch that has as many samples."""
        return self._stages.options.num_parts(self.mesh.pp)

    @property
    def num_stages(self) -> int:
        """Stages over all ranks of the pipeline."""
        return self._stages.options.num_stages(self.mesh.pp)

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return what the ranks do with a batch of so many parts.

        Raises:
            ConfigError: The schedule does not allow it.
        """
        return self._stages.options.table(self.mesh.pp, num_microbatches)

    def expert_load(self) -> Mapping[str, ExpertLoad]:
        """Return by name how the tokens of each mixture were shared out in this fit, or the last.

        Each rank must call while the fit runs.
        """
        return self._experts.load()
