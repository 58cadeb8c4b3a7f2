"""What a checkpoint holds beside Lightning's and torch's entries, for all ranks and for each.

    shared   compression's averages ...                         for any other mesh
    own      random streams, place in the data, residuals ...   for this rank of the same mesh

Both are the section `lightning_shard`, see `checkpoint.by_rank`. After a fit each rank keeps its
own, for a checkpoint that is saved then; ranks of one process bring it together while they are
there.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from lightning_shard.checkpoint.by_rank import gather_entries, own_entry
from lightning_shard.checkpoint.section import section_of
from lightning_shard.data_parallel.compression.state import full_state, load_full_state, own_state
from lightning_shard.data_parallel.host_copies import host_copy
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.mesh import ParallelMesh
from lightning_shard.parallel_dimensions.dimension import ParallelDimension
from lightning_shard.strategies.salvage import SalvagingStrategy
from lightning_shard.trainer.place_in_data import PlaceInData


class KeepingStrategy(SalvagingStrategy):
    """Saves and loads what only this package's strategies keep."""

    _options: EngineOptions
    dimensions: Sequence[ParallelDimension]
    _place: PlaceInData | None = None  # of a fit
    _kept_entries: Mapping[str, Any] = {}  # of the last fit, shared; on rank 0
    _kept_own: Mapping[str, Any] = {}  # of the last fit, this rank's

    @property
    def mesh(self) -> ParallelMesh:
        """The grid of this run's ranks; here all are given different samples."""
        return ParallelMesh(dp=self.world_size)

    def _find_place(self, trainer: "pl.Trainer") -> None:
        """Note the place in the data of the fit that begins, and go on from one that is loaded."""
        if not self.assigns_samples:
            self._place = PlaceInData(trainer, self.root_device, self._random_dimensions)
            self._in_run.enter_context(self._place.inside())

    def _shared_state(self) -> dict[str, Any]:
        """Return what counts for all ranks, on rank 0; each rank must call."""
        compressor = self._options.compression
        if compressor is None or self._engine is None:
            return {}
        keep = self._engine.is_first
        state = full_state(compressor, self._engine.exchanges, keep=keep)
        return {"compression": state} if keep else {}

    def _own_state(self) -> dict[str, Any]:
        """Return what this rank goes on from; no communication, and no copies."""
        assert self._engine is not None
        own = self._random_dimensions() if self._place is None else self._place.state()
        if compression := own_state(self._engine.exchanges):
            own["compression"] = compression
        return own

    def _random_dimensions(self) -> dict[str, Any]:
        """Return what dimensions draw their own random numbers from, by axis."""
        states = {one.axis: one.random_state for one in self.dimensions}
        return {axis: {"random": state} for axis, state in states.items() if state is not None}

    def _section_entries(self) -> dict[str, Any]:
        """Return the section's entries on rank 0; each rank must call."""
        shared, own = self._kept_entries, self._kept_own
        if self._is_fitting() and self._engine is not None:
            shared, own = self._shared_state(), self._own_state()
        return {**shared, **self._gathered(own)}

    @abstractmethod
    def _is_fitting(self) -> bool:
        """Whether a fit runs."""

    def _gathered(self, own: Mapping[str, Any]) -> dict[str, Any]:
        if not own or self._collectives is None:
            return {}
        return gather_entries(own, self.mesh, self._collectives, self.root_device)

    def _keep_state(self, *, failed: bool) -> None:
        """At the end of a fit, keep its state for checkpoints that are saved later; collective."""
        self._kept_entries, self._kept_own = {}, {}
        if failed:
            return
        shared, own = self._shared_state(), self._own_state()
        if self.is_in_process:
            self._kept_entries = {**shared, **self._gathered(own)}
        else:
            self._kept_entries = shared
            self._kept_own = tree_map_only(torch.Tensor, host_copy, own)

    def _load_kept(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from what the ranks have kept; no communication."""
        assert self._engine is not None
        section = section_of(checkpoint)
        own = own_entry(section, self.mesh, self.global_rank)
        compressor = self._options.compression
        if compressor is not None:
            shared = section.get("compression", {})
            load_full_state(compressor, self._engine.exchanges, shared, own.get("compression"))
        for one in self.dimensions:
            if one.axis in own:
                one.random_state = own[one.axis]["random"]
        if self._place is not None:
            self._place.go_on(own, section.get("rank_0", {}))

    @override
    def teardown(self) -> None:
        self._place = None
        super().teardown()
