"""Tensor parallelism as a Lightning strategy: layers split over ranks, the rest data parallel."""

from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from typing_extensions import override

from lightning_shard.backends.base import DEFAULT_TIMEOUT
from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.data_parallel.options import STAGES
from lightning_shard.errors import ConfigError
from lightning_shard.mesh import Axis, ParallelMesh
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.tensor_parallel.plan import match_plan
from lightning_shard.tensor_parallel.split import SplitModel


class TensorParallelStrategy(DataParallelStrategy):
    """Wide layers in parts over the ranks of a group; `strategy="tensor_parallel"`.

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
        tensor_parallel_size: Ranks that share each layer; by default all. What they leave of the
            world is data parallel.
        plan: Maps patterns of module paths to styles: see `tensor_parallel.styles`.
        zero_stage: How the data-parallel ranks keep their state, 0 to 3.

    Raises:
        ConfigError: A size or stage that cannot be, or no plan.
    """

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
        tensor_parallel_size: int | None = None,
        plan: dict[str, Any] | None = None,
        zero_stage: int = 0,
    ) -> None:
        if zero_stage not in STAGES:
            raise ConfigError(f"zero_stage must be one of {STAGES}, got {zero_stage!r}.")
        self.stage = zero_stage  # type: ignore[misc]
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
        )
        self._tensor_parallel_size = tensor_parallel_size
        self._plan = plan
        self._data: Collectives | None = None
        self._tensor: Collectives | None = None
        self._split: SplitModel | None = None

    @property
    def mesh(self) -> ParallelMesh:
        """The grid of this run's ranks."""
        return ParallelMesh.of_world(
            self.world_size, tp=self._tensor_parallel_size or self.world_size
        )

    @property
    @override
    def data_collectives(self) -> Collectives:
        if self._data is None:
            raise ConfigError("There are no groups before trainer.fit (or validate ...) runs.")
        return self._data

    @override
    def _make_groups(self) -> None:
        self._data, self._tensor = self._peers("dp"), self._peers("tp")
        super()._make_groups()

    def _peers(self, axis: Axis) -> Collectives:
        ranks = list(self.mesh.peers(axis, self.global_rank))
        group = dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=True)
        return self.backend.collectives(group)

    @property
    @override
    def _holds_pieces(self) -> bool:
        return super()._holds_pieces or self.mesh.tp > 1

    @override
    def _split_model(self) -> ModelSplit | None:
        assert self.model is not None
        assert self._tensor is not None
        if self._plan is None:
            raise ConfigError(
                "TensorParallelStrategy needs a plan that says which layers to split, such as "
                "plan={'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}."
            )
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            self._tensor.broadcast(tensor.data)
        self._split = SplitModel(self.model, match_plan(self.model, self._plan), self._tensor)
        return self._split

    @override
    def _unsplit_model(self, *, whole: bool) -> None:
        if self._split is not None:
            self._split.restore(whole=whole)
            self._split = None
