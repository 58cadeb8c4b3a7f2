"""Data, tensor and pipeline parallelism together: 3D, on one mesh."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_shard.backends.base import DEFAULT_TIMEOUT
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.mesh import AXES, Axis, ParallelMesh, Placement
from lightning_shard.option_checks import checked_options
from lightning_shard.strategies.combined_split import CombinedSplit
from lightning_shard.strategies.hybrid_sharding import (
    checked_size,
    shard_size,
    warning_of_gathers,
)
from lightning_shard.strategies.model_parallel import checked_ranks
from lightning_shard.strategies.pipeline_parallel import PipelineParallelStrategy
from lightning_shard.strategies.tensor_parallel import TensorParallelStrategy
from lightning_shard.tensor_parallel.parted_tensor import made_whole


class HybridParallelStrategy(TensorParallelStrategy, PipelineParallelStrategy):
    """Stages of split layers, and copies of them on other data; `strategy="hybrid_parallel"`.

    Args:
        accelerator: See `ShardStrategy`, as for the next eight.
        parallel_devices: One device per local rank.
        cluster_environment: Lightning's.
        checkpoint_io: Lightning's.
        precision_plugin: Lightning's.
        backend: "auto" or a backend's name.
        num_ranks: With backend "in_process": ranks to run here.
        timeout: Seconds after which a silent peer is an error.
        debug: Compare every collective call.
        announce: Say in one line, when a fit starts, what runs and what each rank will hold.
        pipeline_parallel_size: Ranks of one pipeline.
        tensor_parallel_size: Ranks that share each layer of a stage.
        data_parallel_size: Models that train on different batches; -1 takes the remaining ranks. A
            pair (replicate, shard) is so many copies of the state, each in pieces on so many
            neighbouring ranks; choose those of a node, and gathers stay inside it.
        zero_stage: How the data-parallel ranks keep their state, 0 to 3. Stage 3 gathers each layer
            for every microbatch's forward and backward, each half of it where those are apart.
        axis_order: The axes "pp", "dp" and "tp" from the slowest to the fastest.
        plan: Of tensor parallel: see `TensorParallelStrategy`.
        schedule: Of the pipeline: see `PipelineParallelStrategy`, as for the rest.
        num_microbatches: Parts of each batch.
        blocks: Path of the list of repeated blocks.
        split: What the stages have alike, or where they begin.

    Raises:
        ConfigError: Sizes that do not fit the ranks, or what either of the two refuses.
    """

    model_axes = ("pp", "tp")

    @checked_options
    def __init__(
        self,
        accelerator: "pl.accelerators.Accelerator | None" = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        backend: str = "auto",
        num_ranks: int | None = None,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        debug: bool = False,
        announce: bool = True,
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        data_parallel_size: int | tuple[int, int] = -1,
        zero_stage: int = 1,
        axis_order: tuple[Axis, Axis, Axis] = AXES,  # type: ignore[assignment]
        plan: dict[str, Any] | str | None = "auto",
        schedule: str = "1f1b",
        num_microbatches: int | None = None,
        blocks: str | None = None,
        split: str | list[int] = "parameters",
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            backend=backend,
            num_ranks=num_ranks,
            timeout=timeout,
            debug=debug,
            announce=announce,
            tensor_parallel_size=checked_ranks("tensor_parallel_size", tensor_parallel_size),
            plan=plan,
            zero_stage=zero_stage,
        )
        self._data_parallel_size = checked_size(data_parallel_size)
        self._axis_order = ParallelMesh(axis_order=axis_order).axis_order  # refused now if need be
        stages = checked_ranks("pipeline_parallel_size", pipeline_parallel_size)
        self._set_pipeline(stages, schedule, num_microbatches, blocks, split)

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
    def placement(self, ranks_per_node: int) -> Placement:
        mesh, found = self.mesh, super().placement(ranks_per_node)
        about = mesh.shard and warning_of_gathers(mesh, mesh.shard, ranks_per_node)
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
    def _unsplit_model(self, *, whole: bool) -> None:
        PipelineParallelStrategy._unsplit_model(self, whole=whole)
        TensorParallelStrategy._unsplit_model(self, whole=whole)

    @override
    def _completed(self, result: Any) -> Any:
        return made_whole(result)
