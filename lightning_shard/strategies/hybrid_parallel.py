"""Data, tensor and pipeline parallelism together: 3D, on one mesh."""

from dataclasses import replace
from typing import Any, Unpack

from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.mesh import NodePlacement, ParallelMesh
from lightning_shard.strategies.combined_split import CombinedSplit
from lightning_shard.strategies.configs import (
    GradientConfig,
    HybridParallelConfig,
    PlanConfig,
    RunConfig,
    ScheduleConfig,
)
from lightning_shard.strategies.flat_options import part, takes
from lightning_shard.strategies.hybrid_sharding import shard_size, warning_of_unshards
from lightning_shard.strategies.options import HybridParallelOptions, PlanOptions, SharedOptions
from lightning_shard.strategies.pipeline_parallel import PipelineParallelStrategy
from lightning_shard.strategies.tensor_parallel import TensorParallelStrategy
from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor


class HybridParallelStrategy(TensorParallelStrategy, PipelineParallelStrategy):
    """Stages of split layers, and copies of them on other data; `strategy="hybrid_parallel"`.

    Raises:
        ConfigError: Sizes that do not fit the ranks, or what either of the two refuses.
    """

    model_axes = ("pp", "tp")

    @takes(RunConfig, HybridParallelConfig, PlanConfig, ScheduleConfig, GradientConfig)
    def __init__(self, **options: Unpack[HybridParallelOptions]) -> None:
        grid = HybridParallelConfig.of(options)
        super().__init__(
            **part(SharedOptions, options),
            **part(PlanOptions, options),
            tensor_parallel_size=grid.tensor_parallel_size,
            zero_stage=grid.zero_stage,
        )
        self._data_parallel_size = grid.data_parallel_size
        self._axis_order = grid.axis_order
        self._set_pipeline(grid.pipeline_parallel_size, ScheduleConfig.of(options))

    @property
    @override
    def mesh(self) -> ParallelMesh:
        pp, tp = self._pipeline_parallel_size, self._tensor_parallel_size
        assert pp is not None
        assert tp is not None
        dp = self._data_parallel_size if isinstance(self._data_parallel_size, int) else -1
        mesh = ParallelMesh.of_world(
            self.world_size, pp=pp, tp=tp, dp=dp, axis_order=self._axis_order
        )
        if isinstance(self._data_parallel_size, int) or self.stage == 0:
            return mesh
        return replace(mesh, shard=shard_size(self._data_parallel_size, mesh.dp))

    @property
    @override
    def shard_size(self) -> int:
        return shard_size(self._data_parallel_size, self.mesh.dp)

    @override
    def placement(self, ranks_per_node: int) -> NodePlacement:
        mesh, found = self.mesh, super().placement(ranks_per_node)
        about = mesh.shard and warning_of_unshards(mesh, mesh.shard, ranks_per_node)
        return replace(found, warnings=(*found.warnings, about)) if about else found

    @override
    def _make_groups(self) -> None:
        for warning in self.placement(self.num_processes).warnings:
            rank_zero_warn(warning)
        super()._make_groups()

    @override
    def _split_model(self) -> ModelSplit | None:
        layers = TensorParallelStrategy._split_model(self)
        stages = PipelineParallelStrategy._split_model(self)
        if self._layers_split is None or self._stage_split is None:
            return layers or stages
        assert self._staged is not None
        self._staged.forget = self._layers_split.forget_activations
        return CombinedSplit(self._layers_split, self._stage_split)

    @override
    def _start_engine(self) -> None:
        super()._start_engine()
        if self._pipeline is not None:
            self._pipeline.at_hand = self.engine.at_hand
            self._pipeline.reformats = self.engine.reformats

    @override
    def _unsplit_model(self, *, full: bool) -> None:
        PipelineParallelStrategy._unsplit_model(self, full=full)
        TensorParallelStrategy._unsplit_model(self, full=full)

    @override
    def _completed(self, result: Any) -> Any:
        return full_tensor(result)
