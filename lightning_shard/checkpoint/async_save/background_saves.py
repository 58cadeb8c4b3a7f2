"""Saves that go on while a fit trains, and where in a run they come to their end.

    trainer.save_checkpoint     waits for the save before; copies; a thread writes, once all ranks
                                have copied. A second one of the same step gets the same files under
                                other names
    the beginning of a step     ranks ask each other how far their threads are, while a save is in
                                flight: a failure is raised on every rank here
    remove_checkpoint           what is to be removed stays until the save in flight is complete
    the end of a fit            waits, with a progress bar
    an exception of all ranks   waits, before callbacks save what there is
    another exception           gives the save up: the checkpoint before stays

Outside a fit's steps, and while callbacks hear of an exception, saves are complete at once.
"""

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.async_save.save_in_flight import (
    FAILED,
    FINISHED,
    SaveInFlight,
    ToSave,
)
from lightning_shard.checkpoint.async_save.save_plans import SavePlans
from lightning_shard.checkpoint.host_buffers import HostBuffers
from lightning_shard.checkpoint.sharded.writing import write_folder
from lightning_shard.errors import CheckpointError


class BackgroundSaves:
    """The saves of one rank, the last of which may be in flight."""

    def __init__(self) -> None:
        self._is_open = False  # between the first and the last step of a fit, if asked for
        self._device = torch.device("cpu")
        self._shows_progress = False
        self._collectives: Collectives | None = None  # of the save in flight, as all below
        self._in_flight: SaveInFlight | None = None
        self._step = -1
        self._to_remove: Collection[str] = ()  # once it is complete
        self._buffers: HostBuffers | None = None
        self._plans = SavePlans()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        own = {"_in_flight": None, "_buffers": None, "_collectives": None, "_plans": SavePlans()}
        return {**vars(self), **own}

    def open(self, device: torch.device, *, shows_progress: bool) -> None:
        """From here on saves may go on in the background.

        Args:
            device: Device of this rank.
            shows_progress: Whether this rank shows how far the last save is, where all wait for it.
        """
        self._is_open, self._device, self._shows_progress = True, device, shows_progress

    def close(self) -> None:
        """From here on saves are complete at once; the one in flight stays."""
        self._is_open = False

    def write(
        self,
        path: Any,
        state: Mapping[str, Any],
        meta: Mapping[str, Any] | None,
        collectives: Collectives | None,
        *,
        step: int | None,
    ) -> None:
        """Write a folder now, or copy it for `start`; each rank of the group must call.

        Args:
            path: As for `write_folder`.
            state: As for `write_folder`.
            meta: As for `write_folder`.
            collectives: As for `write_folder`.
            step: Step of the fit, which goes on meanwhile; None writes the folder now.

        Raises:
            CheckpointError: Some rank could not write, or could not finish the save before.
        """
        if step is None or not self._is_open:
            self.finish()
            write_folder(path, state, meta, collectives)
            return
        saved = ToSave(path, state, meta)
        may_join = step == self._step and os.fspath(path) not in self._to_remove
        if may_join and self._in_flight is not None and self._in_flight.join(saved):
            return
        self.finish()
        if self._buffers is None:
            self._buffers = HostBuffers(pinned=self._device.type == "cuda")
        self._in_flight = SaveInFlight(saved, collectives, self._buffers, self._plans)
        self._collectives, self._step, self._to_remove = collectives, step, ()

    def start(self) -> None:
        """Have threads write what has been copied, where that is so on every rank."""
        if self._in_flight is not None and not self._in_flight.is_started:
            self._in_flight.start()

    def drop_copy(self) -> None:
        """Give up what has been copied and not started; no other rank is asked."""
        if self._in_flight is not None and not self._in_flight.is_started:
            self.discard()

    def finish(self) -> None:
        """Wait until the save in flight is complete, if there is one; each rank must call.

        Raises:
            CheckpointError: It has failed on some rank.
        """
        if self._in_flight is None:
            return
        save, self._in_flight = self._in_flight, None
        total, hidden = save.staged.num_bytes, not self._shows_progress
        with tqdm(
            total=total, desc="Saving", unit="B", unit_scale=True, leave=False, disable=hidden
        ) as bar:
            save.finish(lambda done: bar.update(done - bar.n))

    def advance(self) -> None:
        """Ask whether all ranks are ready with the save in flight; each rank must call.

        Raises:
            CheckpointError: It has failed on some rank.
        """
        save = self._in_flight
        if save is None:
            return
        slowest = self._least(save.progress)
        if slowest == FAILED:
            self._in_flight = None
        if slowest in (FAILED, FINISHED) and save.advance(has_failed=slowest == FAILED):
            self._in_flight = None

    def _least(self, progress: int) -> int:
        if self._collectives is None or self._collectives.size == 1:
            return progress
        flag = torch.tensor(progress, device=self._device)
        self._collectives.all_reduce(flag, "min").wait()
        return int(flag)

    def end(self, error: BaseException, *, is_common: bool) -> None:
        """Close before callbacks hear of an exception, which notes what becomes of the last save.

        Args:
            error: What they hear of.
            is_common: Whether all ranks have raised at the same place, and call this, too.
        """
        self.close()
        if not is_common:
            self._give_up(error)
            return
        try:
            self.finish()
        except CheckpointError as another:
            error.add_note(f"After this error: {another}")

    def _give_up(self, error: BaseException) -> None:
        if self._in_flight is not None:
            error.add_note(
                f"The checkpoint {self._in_flight.paths[0]} was still being written, and is given "
                f"up; those before it are as they were."
            )
        self.discard()

    def discard(self) -> None:
        """Give up the save in flight, if there is one; no other rank is asked."""
        if self._in_flight is not None:
            save, self._in_flight = self._in_flight, None
            save.discard()

    def tear_down(self) -> None:
        """Close, give up what is in flight and let go of memory; no other rank is asked."""
        self.close()
        self.discard()
        self._buffers = self._collectives = None
        self._plans = SavePlans()

    def will_exist(self, path: Any, is_there: bool) -> bool:
        """Whether there will be a checkpoint once no save is in flight; the same on all ranks."""
        if self._in_flight is None:
            return is_there
        coming = map(os.fspath, self._in_flight.paths)
        return (is_there or path in coming) and os.fspath(path) not in self._to_remove

    def once_complete(self, action: Callable[[], None]) -> bool:
        """Have rank 0 do something once the save in flight is complete; False if there is none."""
        if self._in_flight is not None:
            self._in_flight.then(action)
        return self._in_flight is not None

    def remove_later(self, path: Any, remove: Callable[[Any], None]) -> bool:
        """Remove a checkpoint once the save in flight is complete; False if there is none.

        Until then it may be the last one. A thread of rank 0's does it, which is no rank.
        """
        if not self.once_complete(lambda: remove(path)):
            return False
        self._to_remove = {*self._to_remove, os.fspath(path)}
        return True
