"""What a checkpoint holds beside Lightning's and torch's entries, for all ranks and for each.

    shared   compression's steps, PowerSGD's factors ...        the same for all ranks
    own      random streams, place in the data, residuals ...   for this rank of the same mesh

Both are the section `lightning_shard`, see `checkpoint.by_rank`. After a fit each rank keeps its
own, for a checkpoint that is saved then; ranks of one process bring it together while they are
there.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch.utils._pytree import tree_map_only

from lightning_shard.checkpoint.by_rank import (
    entries_of_ranks,
    entry_alone,
    gather_entries,
    in_memory,
    own_entry,
    stream_entries,
)
from lightning_shard.checkpoint.checkpointed_run import CheckpointedRun
from lightning_shard.checkpoint.section import section_of
from lightning_shard.checkpoint.streamed_file import StreamedFile
from lightning_shard.data_parallel.compression.state import (
    load_state,
    own_state,
    shared_by_all,
    with_means,
)
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.host_copies import host_copy
from lightning_shard.trainer.place_in_data import PLACE_ENTRIES, PlaceInData


class Dimension(Protocol):
    """A way in which ranks share a model, which may draw random numbers of its own."""

    random_state: Any  # None where it draws none

    @property
    def axis(self) -> str:
        """Its axis of the mesh."""


class KeepingRun(CheckpointedRun, Protocol):
    """A run whose ranks keep something for themselves."""

    @property
    def checkpoint_format(self) -> str:
        """Whether a checkpoint is a file, "full", or a folder, "sharded"."""

    @property
    def is_in_process(self) -> bool:
        """Whether all ranks run inside this process."""

    @property
    def dimensions(self) -> Sequence[Dimension]:
        """The ways in which ranks share the model."""

    def kept_besides(self) -> Mapping[str, Any]:
        """Return what this rank keeps that no other run does; no communication, and no copies."""


class KeptState:
    """What one rank keeps for checkpoints, in a fit and after it.

    It is told each time which run asks, since another strategy may take it over from a lost rank.
    """

    def __init__(self) -> None:
        self._place: PlaceInData | None = None  # of a fit
        self._shared: Mapping[str, Any] = {}  # of the last fit; on rank 0
        self._own: Mapping[str, Any] = {}  # of the last fit

    def following(self, run: KeepingRun, trainer: "pl.Trainer") -> AbstractContextManager[None]:
        """Inside, note the place in the data, and go on from one that is loaded."""
        self._place = PlaceInData(trainer, run.root_device, partial(_random_dimensions, run))
        return self._place.inside()

    def tear_down(self) -> None:
        """Forget the fit's place in the data."""
        self._place = None

    def _own_state(self, run: KeepingRun, engine: DataParallelEngine) -> dict[str, Any]:
        """Return what this rank goes on from; no communication, and no copies."""
        own = _random_dimensions(run) if self._place is None else self._place.state()
        if compression := own_state(engine.exchanges):
            own["compression"] = compression
        return {**own, **run.kept_besides()}

    def entries(
        self, run: KeepingRun, file: StreamedFile | None, *, is_fitting: bool
    ) -> dict[str, Any]:
        """Return the section's entries; each rank must call.

        Args:
            run: The run that is saved.
            file: The file that is streamed; None where somebody must have all of it, or a folder is
                saved.
            is_fitting: Whether a fit runs; if not, they are those of the last one.

        Returns:
            For a file on rank 0 those of all ranks. For a folder on each rank its own entry, as it
            is and not copied, and on rank 0 what counts for all.
        """
        shared, own, engine = self._shared, self._own, run.present_engine
        if is_fitting and engine is not None:
            shared, own = shared_state(engine), self._own_state(run, engine)
        if run.checkpoint_format != "sharded":
            return {**shared, **_gathered(run, own, file)}
        return {**shared, **(entry_alone(own, run.mesh, run.mesh_rank) if own else {})}

    def keep(self, run: KeepingRun, *, failed: bool) -> None:
        """At the end of a fit, keep its state for checkpoints that are saved later; collective."""
        self._shared, self._own = {}, {}
        if failed:
            return
        assert run.present_engine is not None
        shared = shared_state(run.present_engine)
        own = self._own_state(run, run.present_engine)
        if run.is_in_process:
            self._shared = {**shared, **_gathered(run, own)}
        else:
            self._shared, self._own = shared, tree_map_only(torch.Tensor, host_copy, own)

    def load(self, run: KeepingRun, checkpoint: Mapping[str, Any]) -> None:
        """Go on from what the ranks have kept; no communication."""
        section = section_of(checkpoint)
        own = own_entry(section, run.mesh, run.mesh_rank)
        assert run.present_engine is not None
        compressor = run.present_engine.options.compression
        if compressor is not None:
            kept = [entry.get("compression", {}) for _, entry in entries_of_ranks(section)]
            shared = with_means(section.get("compression", {}), kept)
            exchanges = run.present_engine.exchanges
            load_state(compressor, exchanges, shared, own.get("compression"))
        for one in run.dimensions:
            if one.axis in own:
                one.random_state = in_memory(own[one.axis]["random"])
        if self._place is not None:
            self._place.go_on(_of_place(own), _of_place(section.get("rank_0", {})))


def _of_place(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank's place in the data is made of, in memory: its checkpoint may go."""
    return {key: in_memory(entry[key]) for key in PLACE_ENTRIES if key in entry}


def shared_state(engine: DataParallelEngine) -> dict[str, Any]:
    """Return what counts for all ranks, on rank 0; no communication."""
    if engine.options.compression is None or not engine.is_first:
        return {}
    return {"compression": shared_by_all(engine.options.compression, engine.exchanges)}


def _random_dimensions(run: KeepingRun) -> dict[str, Any]:
    """Return what dimensions draw their own random numbers from, by axis."""
    states = {one.axis: one.random_state for one in run.dimensions}
    return {axis: {"random": state} for axis, state in states.items() if state is not None}


def _gathered(
    run: KeepingRun, own: Mapping[str, Any], file: StreamedFile | None = None
) -> dict[str, Any]:
    group = run.present_collectives
    if not own or group is None:
        return {}
    if file is None:
        return gather_entries(own, run.mesh, group, run.root_device)
    return stream_entries(own, run.mesh, group, run.root_device, file)
