"""Saves that go on while a fit trains, and where in a run they come to their end.

    trainer.save_checkpoint     waits for the save before; copies; a thread writes. A second one of
                                the same step gets the same files under other names
    the beginning of a step     ranks ask each other how far their threads are, while a save is in
                                flight: a failure is raised on every rank here
    remove_checkpoint           what is to be removed stays until the save in flight is complete
    the end of a fit            waits, with a progress bar
    an exception of all ranks   waits, before callbacks save what there is
    another exception           gives the save up: the checkpoint before stays

Outside a fit's steps, and while callbacks hear of an exception, saves are complete at once.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerStatus
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from typing_extensions import override

from lightning_shard.checkpoint.async_save.save_in_flight import FAILED, FINISHED, SaveInFlight
from lightning_shard.checkpoint.host_buffers import HostBuffers
from lightning_shard.checkpoint.sharded.writing import write_folder
from lightning_shard.errors import CheckpointError
from lightning_shard.strategies.salvage import SalvagingStrategy
from lightning_shard.trainer._lightning import knowing_saves_in_flight


class AsyncSavingStrategy(SalvagingStrategy):
    """Writes folders, in the background where that was asked for."""

    meets_at_steps: ClassVar[bool] = True  # whether all ranks begin each step together
    _in_flight: SaveInFlight | None = None
    _to_remove: Collection[str] = ()  # once the save in flight is complete
    _buffers: HostBuffers | None = None
    _saved_step = -1  # of the save in flight
    _is_in_steps = False  # between the first and the last of a fit

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_in_flight": None, "_buffers": None}

    def _write_folder(
        self, path: Any, state: Mapping[str, Any], meta: Mapping[str, Any] | None, *, alone: bool
    ) -> None:
        """Write a folder, now or in the background; each rank must call unless one is alone."""
        collectives = None if alone or not torch.distributed.is_initialized() else self._collectives
        if alone or not self._saves_in_background:
            self.finish_save()
            write_folder(path, state, meta, collectives)
            return
        assert self.lightning_module is not None
        step = self.lightning_module.trainer.global_step
        may_join = step == self._saved_step and os.fspath(path) not in self._to_remove
        if may_join and self._in_flight is not None and self._in_flight.join(path, state, meta):
            return
        self.finish_save()
        if self._buffers is None:
            self._buffers = HostBuffers(pinned=self.root_device.type == "cuda")
        self._in_flight = SaveInFlight(path, state, meta, collectives, self._buffers)
        self._saved_step, self._to_remove = step, ()

    @property
    def _saves_in_background(self) -> bool:
        module = self.lightning_module
        return (
            self.async_save
            and self._is_in_steps
            and self._engine is not None
            and module is not None
            and module.trainer.state.status == TrainerStatus.RUNNING
        )

    def finish_save(self) -> None:
        """Wait until the save in flight is complete, if there is one; each rank must call.

        Raises:
            CheckpointError: It has failed on some rank.
        """
        if self._in_flight is None:
            return
        save, self._in_flight = self._in_flight, None
        with self._progress_bar(save) as tell:
            save.finish(tell)

    @contextmanager
    def _progress_bar(self, save: SaveInFlight) -> Iterator[Any]:
        module = self.lightning_module
        shows = module is not None and module.trainer.progress_bar_callback is not None
        total = save.staged.num_bytes
        hidden = not (shows and self.is_global_zero)
        with tqdm(
            total=total, desc="Saving", unit="B", unit_scale=True, leave=False, disable=hidden
        ) as bar:
            yield lambda done: bar.update(done - bar.n)

    def _advance_save(self) -> None:
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
        flag = torch.tensor(progress, device=self.root_device)
        self._collectives.all_reduce(flag, "min").wait()
        return int(flag)

    def _give_up_save(self, error: BaseException) -> None:
        if self._in_flight is not None:
            error.add_note(
                f"The checkpoint {self._in_flight.paths[0]} was still being written, and is given "
                f"up; those before it are as they were."
            )
        self._discard_save()

    def _discard_save(self) -> None:
        """Give up the save in flight, if there is one; no other rank is asked."""
        if self._in_flight is not None:
            save, self._in_flight = self._in_flight, None
            save.discard()

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._is_in_steps = self.async_save
        if self.async_save:
            assert self.lightning_module is not None
            for callback in self.lightning_module.trainer.checkpoint_callbacks:
                if isinstance(callback, ModelCheckpoint):
                    self._in_run.enter_context(
                        knowing_saves_in_flight(callback, self._will_exist, self._once_complete)
                    )

    def _will_exist(self, path: Any, is_there: bool) -> bool:
        """Whether there will be a checkpoint once no save is in flight; the same on all ranks."""
        if self._in_flight is None:
            return is_there
        coming = map(os.fspath, self._in_flight.paths)
        return (is_there or path in coming) and os.fspath(path) not in self._to_remove

    def _once_complete(self, action: Callable[[], None]) -> bool:
        if self._in_flight is not None:
            self._in_flight.then(action)
        return self._in_flight is not None

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.meets_at_steps:
            self._advance_save()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._is_in_steps = False
        self.finish_save()

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self._in_flight is None:
            super().remove_checkpoint(filepath)
        else:  # until then it may be the last one; a thread does it, which is no rank
            self._in_flight.then(partial(self.checkpoint_io.remove_checkpoint, filepath))
            self._to_remove = {*self._to_remove, os.fspath(filepath)}

    @override
    def salvaging(
        self, error: BaseException, *, is_common: bool, gone: Sequence[int]
    ) -> AbstractContextManager[None]:
        self._is_in_steps = False
        if not is_common:
            self._give_up_save(error)
        else:
            try:
                self.finish_save()
            except CheckpointError as another:
                error.add_note(f"After this error: {another}")
        return super().salvaging(error, is_common=is_common, gone=gone)

    @override
    def teardown(self) -> None:
        self._is_in_steps = False
        self._discard_save()
        self._buffers = None
        super().teardown()
