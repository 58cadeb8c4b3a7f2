"""A process group of which one rank is there, and whose peers are a tape.

    while a step is replayed    each call gets its recorded result
    before and after            each call gets what it would, were all peers copies of this rank

Setting a fit up takes calls, too, whose results do not matter: what a rank begins the step from is
loaded from its record.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback
from torch import Tensor
from torch.distributed import Work
from typing_extensions import override

from lightning_shard.backends import _c10d
from lightning_shard.backends.base import Backend
from lightning_shard.backends.calls import Call, op_name
from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.exchange import ExchangeCollectives
from lightning_shard.backends.group_handle import CallWork
from lightning_shard.backends.packing import write
from lightning_shard.backends.pending import StartedTransfer
from lightning_shard.backends.python_group import PythonGroup
from lightning_shard.checkpoint.random_state import load_random_state
from lightning_shard.checkpoint.rank_snapshot import load
from lightning_shard.core.extensions import SharedByCopies
from lightning_shard.data_parallel.optimizer_entries import host_copy
from lightning_shard.errors import ConfigError, RankFailedError
from lightning_shard.planning.dry_run import SimulatedEnvironment
from lightning_shard.replay.rank_record import RankRecord, own_error, state_digest
from lightning_shard.replay.tape import WITHOUT_RESULT, CallTape, set_buffers, set_full, set_place
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.trainer._lightning import without_sigterm_broadcast
from lightning_shard.strategies.trainer.hook_advice import OnlyLooks
from lightning_shard.tools.proving.strategies import batches_seen

# What brings the ranks of a replay to the recorded step, and notes what comes of it there.
#
# loader's first batch ──> the engine, the optimizers, the Trainer's loops as they were
# each batch           ──> the recorded one, and the recorded random streams
# the last one's end   ──> the fit ends

_ENDLESS = 2**31


@dataclass(kw_only=True)
class Outcome:
    """What came of the step on one rank."""

    losses: list[Tensor] = field(default_factory=list)
    error: tuple[str, str] | None = None
    state: str = ""


class Shelf(SharedByCopies):
    """The records of all ranks and what came of them; a rank's copy of it is itself."""

    def __init__(self, records: Sequence[RankRecord], tape: CallTape | None = None) -> None:
        self.records = {one.rank: one for one in records}
        self.outcomes = {rank: Outcome() for rank in self.records}
        self._tape = tape

    def play(self, *, on: bool) -> None:
        """Let the tape answer from now on, or not; without one peers do."""
        if self._tape is not None:
            self._tape.is_playing = on


class Replayer(OnlyLooks, Callback):
    """Brings a rank to where its record begins, and notes what comes of the step."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._in_fit = ExitStack()
        self._number = 0  # of the next batch

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._in_fit.enter_context(batches_seen(trainer, partial(self._prepare, trainer)))
        self._in_fit.enter_context(without_sigterm_broadcast(trainer))

    def _prepare(self, trainer: "pl.Trainer", _: Any) -> None:
        """Set the random streams as they were when this batch was fetched."""
        if not trainer.training:
            return
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
        if strategy.run.engine is not None:
            buffers = trainer.lightning_module.buffers()
            digest = state_digest(strategy.engine, strategy.optimizers, buffers)
            self._outcome(trainer).state = digest

    def _outcome(self, trainer: "pl.Trainer") -> Outcome:
        return self._shelf.outcomes[_rank_of(trainer)]


class RecordedData(pl.LightningDataModule):
    """Gives each rank its recorded batches, and sets its state before the first."""

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
    """An iterable of the recorded batches, each a copy, since a step may write into it."""

    # It has a length, whatever the recorded loader had, since of a loader without one Lightning
    # fetches a batch before its loops begin, too early to set them.

    def __init__(self, record: RankRecord, bring: Callable[[], None]) -> None:
        self._record, self._bring = record, bring

    def __len__(self) -> int:
        number = self._record.setup["num_batches"]
        return _ENDLESS if number == float("inf") else int(number)

    def __iter__(self) -> Iterator[Any]:
        self._bring()
        for one in self._record.given:
            yield copy.deepcopy(one.batch)


NAME = "recorded"
_tapes: list[CallTape] = []  # of the one replay that runs, if any


class RecordedGroup(PythonGroup):
    """One rank's handle of a group whose other ranks are not there."""

    backend_name: ClassVar[str] = NAME

    def __init__(self, tape: CallTape, name: str, global_ranks: tuple[int, ...], rank: int) -> None:
        super().__init__(name, global_ranks, rank)
        self.tape = tape

    @override
    def _start(self, call: Call) -> Work:
        if not self.tape.is_playing:
            with torch.no_grad():
                _echo(call, self.size())
            return _Done(call)
        return _Played(call, self.tape)


class _Done(CallWork):
    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    @override
    def is_completed(self) -> bool:
        return True

    @override
    def is_success(self) -> bool:
        return True

    @override
    def _source(self) -> int:
        return 0


class _Played(_Done):
    """A call that takes its place on the tape when it begins, and its result when waited for."""

    def __init__(self, call: Call, tape: CallTape) -> None:
        super().__init__(call)
        written = [] if call.op in WITHOUT_RESULT else call.results or call.outputs
        self._deliver: Callable[[], None] | None = tape.next(call.op, written)

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        deliver, self._deliver = self._deliver, None
        if deliver is not None:
            deliver()
        return True


def _echo(call: Call, size: int) -> None:
    """Write what a call would give if every rank had called it with the same tensors."""
    if call.op in ("all_reduce", "reduce"):
        for one in call.inputs:
            write(one, _reduced(one, call.reduce_op, size))
    elif call.op.startswith("all_gather") or call.op == "gather":
        slots = call.outputs
        for number, one in enumerate(slots):
            source = call.inputs[min(number, len(call.inputs) - 1)]
            write(one, source if one.numel() == source.numel() else _repeated(source, size))
    elif call.op.startswith("reduce_scatter"):
        for one, source in zip(call.outputs, _own_parts(call, size), strict=True):
            write(one, _reduced(source, call.reduce_op, size))
    elif call.op.startswith("all_to_all"):
        for one, source in zip(call.outputs, call.inputs, strict=True):
            one.data.zero_()
            if one.numel() == source.numel():
                write(one, source)


def _own_parts(call: Call, size: int) -> Iterator[Tensor]:
    if call.op == "reduce_scatter":
        yield call.inputs[call.rank]
        return
    for one in call.inputs:
        yield one.reshape(size, -1)[call.rank]


def _repeated(source: Tensor, size: int) -> Tensor:
    return source.reshape(-1).repeat(size)


def _reduced(tensor: Tensor, op: Any, size: int) -> Tensor:
    is_sum = op is not None and op_name(op) == "SUM" and tensor.dtype is not torch.bool
    return tensor * size if is_sum else tensor


def _either(name: str) -> Callable[..., StartedTransfer]:
    """Make the method that begins an operation as Gloo does, or without peers in one call."""

    def begin(self: "_RecordedExchange", *args: Any) -> StartedTransfer:
        is_playing = self.group.tape.is_playing  # type: ignore[attr-defined]
        owner = ExchangeCollectives if is_playing else Collectives
        started: StartedTransfer = getattr(owner, name)(self, *args)
        return started

    return begin


class _RecordedExchange(ExchangeCollectives):
    """The exchange collectives, whose messages are on the tape while it plays."""

    _all_reduce = _either("_all_reduce")
    _reduce_scatter = _either("_reduce_scatter")
    _all_gather = _either("_all_gather")
    _reduce_slices = _either("_reduce_slices")
    _gather_slices = _either("_gather_slices")
    _all_to_all = _either("_all_to_all")


def _alone(kind: type[Collectives]) -> type[Collectives]:
    class RankAlone(kind):  # type: ignore[misc,valid-type]
        """Objects, which nobody else has, come back as they are."""

        @override
        def all_gather_object(self, obj: Any) -> list[Any]:
            if self.group.tape.is_playing:
                found: list[Any] = super().all_gather_object(obj)
                return found
            return [obj] * self.size

        @override
        def broadcast_object(self, obj: Any, src: int = 0) -> Any:
            return super().broadcast_object(obj, src) if self.group.tape.is_playing else obj

    return RankAlone


_EXCHANGE, _PLAIN = _alone(_RecordedExchange), _alone(Collectives)


class RecordedBackend(Backend):
    """The backend of a rank that is replayed alone."""

    name: ClassVar[str] = NAME
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)

    def __init__(self, recorded: str) -> None:
        self._kind = _EXCHANGE if recorded in ("gloo", "mpi") else _PLAIN

    @override
    def unavailable_reason(self) -> str | None:
        return None

    @override
    def init_process_group(self, **_: Any) -> None:
        raise ConfigError("A rank is replayed alone in a group that stands already.")

    @override
    def collectives(self, group: dist.ProcessGroup) -> Collectives:
        return self._kind(group)


@contextmanager
def group_of_one(tape: CallTape, num_ranks: int) -> Iterator[None]:
    """Let this process be one rank of so many inside, of which no other is there."""
    if dist.is_initialized():
        raise ConfigError(
            "replay(rank=...) makes a process group of its own, but one stands already; expected "
            "none. Replay in a process of its own, or after destroy_process_group()."
        )
    _tapes.append(tape)
    try:
        dist.init_process_group(NAME, store=_c10d.HashStore(), rank=tape.rank, world_size=num_ranks)
        yield
    finally:
        tape.is_playing = False
        if dist.is_initialized():
            dist.destroy_process_group()
        _tapes.pop()


def _make_group(options: Any, backend_options: Any) -> RecordedGroup:
    del backend_options
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return RecordedGroup(_tapes[-1], options.group_id, ranks, options.group_rank)


if dist.is_available():
    _c10d.register_backend(NAME, _make_group, ["cpu"])


def alone(
    record: RankRecord, strategy: DataParallelStrategy
) -> tuple[Shelf, DataParallelStrategy, AbstractContextManager[None]]:
    """Prepare to take one rank alone, of a record with results.

    Returns:
        Where what comes of it is noted, the strategy of the rank, and what must be around its fit.
    """
    is_cut_short = record.error is not None and record.error[0] == RankFailedError.__name__
    tape = CallTape(rank=record.rank, results=record.results or (), is_cut_short=is_cut_short)
    environment = SimulatedEnvironment(record.num_ranks, record.rank)
    made = strategy.with_options(backend="gloo", num_ranks=None, cluster_environment=environment)
    made.local_ranks.use(RecordedBackend(record.setup["backend"]))
    made.run.loops.compares = False  # with whom?
    return Shelf([record], tape), made, _as_rank(tape, record.num_ranks)


@contextmanager
def _as_rank(tape: CallTape, num_ranks: int) -> Iterator[None]:
    before = getattr(rank_zero_only, "rank", None)
    try:
        with group_of_one(tape, num_ranks):
            yield
    finally:
        setattr(rank_zero_only, "rank", before)  # noqa: B010  (a function attribute)
