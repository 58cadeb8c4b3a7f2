"""What brings the ranks of a replay to the recorded step, and notes what comes of it there.

loader's first batch ──> the engine, the optimizers, the Trainer's loops as they were
each batch           ──> the recorded one, and the recorded random streams
the last one's end   ──> the fit ends
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_shard.checkpoint.random_state import load_random_state
from lightning_shard.checkpoint.snapshot_loading import load
from lightning_shard.data_parallel.optimizer_entries import host_copy
from lightning_shard.replay.place import set_buffers, set_full, set_place
from lightning_shard.replay.rank_record import RankRecord, own_error, state_digest
from lightning_shard.replay.tape import CallTape
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.trainer._lightning import without_sigterm_broadcast
from lightning_shard.trainer.hook_advice import OnlyLooks

_ENDLESS = 2**31


@dataclass(kw_only=True)
class Outcome:
    """What came of the step on one rank.

    Attributes:
        losses: The loss of each backward pass.
        error: Class and message of what was raised; None for nothing.
        state: Digest of the shards, the optimizer state and the buffers at the end.
    """

    losses: list[Tensor] = field(default_factory=list)
    error: tuple[str, str] | None = None
    state: str = ""


class Shelf:
    """The records of all ranks and what came of them; a rank's copy of it is itself.

    Args:
        records: What was recorded of each rank, or of the one that is taken alone.
        tape: Answers the calls of a rank that is taken alone.
    """

    def __init__(self, records: Sequence[RankRecord], tape: CallTape | None = None) -> None:
        self.records = {one.rank: one for one in records}
        self.outcomes = {rank: Outcome() for rank in self.records}
        self._tape = tape

    def play(self, *, on: bool) -> None:
        """Let the tape answer from now on, or not; without one peers do."""
        if self._tape is not None:
            self._tape.is_playing = on

    def __deepcopy__(self, memo: Mapping[int, Any]) -> "Shelf":
        return self


class Replayer(OnlyLooks, Callback):
    """Brings a rank to where its record begins, and notes what comes of the step.

    Args:
        shelf: What was recorded, and takes what comes of it.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._in_fit = ExitStack()
        self._number = 0  # of the next batch

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        plugin = trainer.precision_plugin
        convert = plugin.convert_input

        def set_up(batch: Any) -> Any:
            if trainer.training:
                self._prepare(trainer)
            return convert(batch)

        self._in_fit.enter_context(patch.object(plugin, "convert_input", set_up))
        self._in_fit.enter_context(without_sigterm_broadcast(trainer))

    def _prepare(self, trainer: "pl.Trainer") -> None:
        """Set the random streams as they were when this batch was fetched."""
        given = self._shelf.records[_rank_of(trainer)].given[self._number]
        trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = given.is_last
        load_random_state(given.random, trainer.strategy.root_device)
        self._number += 1
        self._shelf.play(on=True)

    @override
    def on_before_backward(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss: Tensor
    ) -> None:
        self._outcome(trainer).losses.append(host_copy(loss.clone()))

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", *_: Any, **__: Any) -> None:
        if self._number == len(self._shelf.records[_rank_of(trainer)].given):
            self._note_state(trainer)
            self._shelf.play(on=False)
            trainer.should_stop = True

    @override
    def on_exception(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException
    ) -> None:
        self._shelf.play(on=False)
        self._outcome(trainer).error = own_error(exception)
        if self._number:
            self._note_state(trainer)
        self._in_fit.close()

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._in_fit.close()

    def _note_state(self, trainer: "pl.Trainer") -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, DataParallelStrategy)
        if strategy.present_engine is not None:
            buffers = trainer.lightning_module.buffers()
            digest = state_digest(strategy.engine, strategy.optimizers, buffers)
            self._outcome(trainer).state = digest

    def _outcome(self, trainer: "pl.Trainer") -> Outcome:
        return self._shelf.outcomes[_rank_of(trainer)]


class RecordedData(pl.LightningDataModule):
    """Gives each rank its recorded batches, and sets its state before the first.

    Args:
        shelf: What was recorded, and takes what comes of it.
    """

    def __init__(self, shelf: Shelf) -> None:
        super().__init__()
        self._shelf = shelf

    @override
    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        record = self._shelf.records[_rank_of(self.trainer)]
        return _Batches(record, partial(_bring, self.trainer, record))


def _rank_of(trainer: "pl.Trainer") -> int:
    assert isinstance(trainer.strategy, DataParallelStrategy)
    return trainer.strategy.mesh_rank


def _bring(trainer: "pl.Trainer", record: RankRecord) -> None:
    """Bring this rank to where its record begins; each rank must call."""
    strategy = trainer.strategy
    assert isinstance(strategy, DataParallelStrategy)
    load(record.snapshot, strategy.engine, strategy.optimizers)
    if record.full:
        set_full(strategy.engine, record.full)
    set_buffers(trainer.lightning_module, record.buffers)
    strategy.engine.follow_orders(*record.orders)
    set_place(trainer, record.place)
    trainer.fit_loop.max_batches = record.setup["num_batches"]


class _Batches:
    """An iterable of the recorded batches, each a copy, since a step may write into it.

    It has a length, whatever the recorded loader had, since of a loader without one Lightning
    fetches a batch before its loops begin, too early to set them.
    """

    def __init__(self, record: RankRecord, bring: Callable[[], None]) -> None:
        self._record, self._bring = record, bring

    def __len__(self) -> int:
        number = self._record.setup["num_batches"]
        return _ENDLESS if number == float("inf") else int(number)

    def __iter__(self) -> Iterator[Any]:
        self._bring()
        for one in self._record.given:
            yield copy.deepcopy(one.batch)
