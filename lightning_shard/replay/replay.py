"""Takes a recorded step again, with all its ranks as threads of this process.

A process group of which one rank is there, and whose peers are a tape.

    while a step is replayed    each call gets its recorded result
    before and after            each call gets what it would, were all peers copies of this rank

Setting a fit up takes calls, too, whose results do not matter: what a rank begins the step from is
loaded from its record.
"""

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed import Work
from typing_extensions import override

from lightning_shard.backends import _c10d
from lightning_shard.backends.base import Backend
from lightning_shard.backends.calls import Call, op_name
from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.exchange import ExchangeCollectives
from lightning_shard.backends.group_handle import CallWork, ranks_of
from lightning_shard.backends.in_process.channel import like_gloo
from lightning_shard.backends.packing import write
from lightning_shard.backends.pending import StartedTransfer
from lightning_shard.backends.python_group import PythonGroup
from lightning_shard.checkpoint.random_state import load_random_state
from lightning_shard.checkpoint.rank_snapshot import load
from lightning_shard.core.extensions import SharedByCopies
from lightning_shard.data_parallel.optimizer_entries import host_copy
from lightning_shard.errors import CheckpointError, ConfigError, RankFailedError
from lightning_shard.planning.dry_run import SimulatedEnvironment
from lightning_shard.replay.rank_record import (
    RankRecord,
    bits,
    own_error,
    read_record,
    read_records,
    state_digest,
    versions,
)
from lightning_shard.replay.tape import WITHOUT_RESULT, CallTape, set_buffers, set_full, set_place
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.names import strategy_name
from lightning_shard.strategies.trainer._lightning import without_sigterm_broadcast
from lightning_shard.strategies.trainer.hook_advice import OnlyLooks
from lightning_shard.tools.proving.strategies import (
    QUIET_OPTIONS,
    StrategyLike,
    batches_seen,
    quiet,
    strategy_in_process,
)

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

    backend_name = NAME

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
    before = getattr(rank_zero_only, "rank", None)
    try:
        dist.init_process_group(NAME, store=_c10d.HashStore(), rank=tape.rank, world_size=num_ranks)
        yield
    finally:
        tape.is_playing = False
        if dist.is_initialized():
            dist.destroy_process_group()
        _tapes.pop()
        setattr(rank_zero_only, "rank", before)  # noqa: B010  (a function attribute)


def _make_group(options: Any, backend_options: Any) -> RecordedGroup:
    del backend_options
    return RecordedGroup(_tapes[-1], options.group_id, ranks_of(options), options.group_rank)


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
    return Shelf([record], tape), made, group_of_one(tape, record.num_ranks)


_OF_PEERS = RankFailedError.__name__
_REASONS = {
    "failure": "it raised an error",
    "loss": "its loss was not finite",
    "asked": "it was asked for",
}


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a replay has found.

    Attributes:
        folder: Folder of the recorded step.
        step: Optimizer steps done before the step.
        num_ranks: Ranks of the run.
        strategy: Name of the strategy.
        reason: Why it was recorded.
        outcome: "reproduced" or "not reproduced": the error, the loss that is not finite, or the
            losses and the state of a step that was asked for.
        is_bitwise: Whether all losses and the state at the end have the recorded bits.
        recorded: What was recorded, in words.
        replayed: What came of the replay, in words.
        losses: Whether losses are the same, in words.
        state: Whether the state at the end is the same, in words.
        notes: What differs between then and here.
        error: What the replay raised, with its traceback; None for nothing.
        rank: The rank that was taken alone; None for all.
    """

    folder: str
    step: int
    num_ranks: int
    strategy: str
    reason: str
    outcome: Literal["reproduced", "not reproduced"]
    is_bitwise: bool
    recorded: str
    replayed: str
    losses: str
    state: str
    notes: tuple[str, ...] = ()
    error: BaseException | None = None
    rank: int | None = None

    @property
    def exit_status(self) -> int:
        """0 for reproduced, 1 for not."""
        return int(self.outcome != "reproduced")

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield what there is to say, each with its title."""
        yield "recorded", self.recorded
        yield "replayed", self.replayed
        yield "losses", self.losses
        yield "state", self.state
        for note in self.notes:
            yield "note", note

    def as_json(self) -> str:
        """Return everything but the traceback, as JSON."""
        told: dict[str, Any] = {
            name: value for name, value in vars(self).items() if name != "error"
        }
        return json.dumps(told, indent=1)


def judge(
    folder: str,
    records: Sequence[RankRecord],
    outcomes: Sequence[Outcome],
    error: BaseException | None,
    notes: Sequence[str],
) -> Replayed:
    """Compare what came of a step with what was recorded."""
    first = records[0]
    ranks = [one.rank for one in records]
    reason = next((one.reason for one in records if one.reason != "asked"), first.reason)
    losses, is_same_loss = _losses(records, outcomes)
    is_same_state = [one.state for one in records] == [one.state for one in outcomes]
    if reason == "failure":
        came_again = _came_again(records, outcomes)
    elif reason == "loss":
        came_again = _not_finite(ranks, records) == _not_finite(ranks, outcomes)
    else:
        came_again = is_same_loss and is_same_state
    return Replayed(
        folder=folder,
        step=first.step,
        num_ranks=first.num_ranks,
        strategy=first.setup["strategy"],
        reason=_REASONS[reason],
        outcome="reproduced" if came_again else "not reproduced",
        is_bitwise=is_same_loss and is_same_state,
        recorded=_told(ranks, records),
        replayed=_told(ranks, outcomes),
        rank=None if len(records) == first.num_ranks else first.rank,
        losses=losses,
        state=_state(records, is_same_state),
        notes=tuple(notes),
        error=error,
    )


def _came_again(records: Sequence[RankRecord], outcomes: Sequence[Outcome]) -> bool:
    ranks = [one.rank for one in records]
    expected, got = (_origin(ranks, [one.error for one in side]) for side in (records, outcomes))
    if expected or len(records) == records[0].num_ranks:
        return got == expected
    # of a rank that is taken alone, which a peer's failure has ended
    error = outcomes[0].error
    return error is not None and error[0] == _OF_PEERS


def _origin(
    ranks: Sequence[int], errors: Sequence[tuple[str, str] | None]
) -> dict[int, tuple[str, str]]:
    """Return by rank what was raised there, without what peers were raised for it."""
    by_rank = zip(ranks, errors, strict=True)
    return {r: one for r, one in by_rank if one is not None and one[0] != _OF_PEERS}


def _not_finite(ranks: Sequence[int], found: Sequence[RankRecord | Outcome]) -> list[int]:
    return [
        rank
        for rank, one in zip(ranks, found, strict=True)
        if any(not torch.isfinite(loss).all() for loss in one.losses)
    ]


def _told(ranks: Sequence[int], found: Sequence[RankRecord | Outcome]) -> str:
    origin = _origin(ranks, [one.error for one in found])
    if origin:
        return "; ".join(f"rank {r}: {name}: {text}" for r, (name, text) in origin.items())
    by_rank = list(zip(ranks, found, strict=True))
    if any(one.error for one in found):
        return "; ".join(f"rank {r}: {one.error[1]}" for r, one in by_rank if one.error)
    not_finite = _not_finite(ranks, found)
    if not_finite:
        return f"a loss that is not finite on rank {', '.join(map(str, not_finite))}"
    return "no error"


def _losses(records: Sequence[RankRecord], outcomes: Sequence[Outcome]) -> tuple[str, bool]:
    count = sum(len(one.losses) for one in records)
    for record, outcome in zip(records, outcomes, strict=True):
        if len(record.losses) != len(outcome.losses):
            return (
                f"rank {record.rank} came to {len(outcome.losses)} backward passes, expected "
                f"{len(record.losses)}",
                False,
            )
        for number, (got, expected) in enumerate(zip(outcome.losses, record.losses, strict=True)):
            if bits(got) != bits(expected):
                return _difference(record.rank, number, got, expected), False
    return f"of {count} backward passes on {len(records)} ranks: the same bits", True


def _difference(rank: int, number: int, got: Tensor, expected: Tensor) -> str:
    relative = (got.double() - expected.double()).abs() / expected.double().abs()
    return (
        f"rank {rank}, backward pass {number}: got {got.item()!r}, expected {expected.item()!r}, "
        f"relative deviation {relative.item():.1e}"
    )


def _state(records: Sequence[RankRecord], is_same: bool) -> str:
    if is_same:
        ranks = f"{len(records)} ranks"
        return f"parameters, optimizer state and buffers at the end have the same bits on {ranks}"
    return "parameters, optimizer state or buffers at the end have other bits."


def replay(
    folder: str | Path,
    module: "pl.LightningModule",
    *,
    strategy: StrategyLike | None = None,
    callbacks: Sequence[Callback] = (),
    rank: int | None = None,
    trust: bool = False,
) -> Replayed:
    """Take a step again that `RecordSteps` has recorded, with all ranks in this process, or one.

    Every rank gets its shards, optimizer state, buffers, batches and random streams of then, and is
    a thread of this process; one runs at a time, in the same order every time, so that a debugger
    works in user code.

    Args:
        folder: The step's folder, with a file of each rank.
        module: The user's module, made as in the recorded run; it is left as the step leaves it.
        strategy: The recorded run's strategy, if it had options of its own (units, bucket_mb ...);
            its backend does not matter. None takes the recorded name.
        callbacks: The user's callbacks that change what is computed.
        rank: The one rank that is taken, where all do not fit; its collectives get the results
            that `RecordSteps(results=True)` has kept, and no other rank's file is needed.
        trust: Whether classes of user code in the files may be made, which can run any code that
            their writer has put there.

    Returns:
        Whether the failure came again, and whether losses and state have the same bits.

    Raises:
        CheckpointError: A file is missing, damaged, needs trust, or does not fit the module.
        ConfigError: The strategy is not the recorded one.
    """
    if rank is not None:
        records = [read_record(Path(folder), rank, trust=trust)]
    else:
        records = read_records(Path(folder), trust=trust)
    made = _as_named(strategy, records[0], str(folder))
    if rank is None:
        shelf = Shelf(records)
        is_of_gloo = records[0].setup["backend"] == "gloo"
        where: AbstractContextManager[None] = like_gloo() if is_of_gloo else nullcontext()
    else:
        shelf, made, where = alone(records[0], made)
    with quiet(), _as_recorded(records[0]), where:
        error = _fit(module, made, shelf, records[0], callbacks)
    outcomes = list(shelf.outcomes.values())
    return judge(str(folder), records, outcomes, error, _notes(records[0]))


def _as_named(
    strategy: StrategyLike | None, record: RankRecord, folder: str
) -> DataParallelStrategy:
    name = record.setup["strategy"]
    made = strategy_in_process(strategy or name, record.num_ranks, asked_by="replay")
    if (got := strategy_name(made)) != name:
        raise ConfigError(
            f"replay got the strategy {got!r}, expected {name!r}, under which {folder} was "
            f"recorded. Leave strategy out, or pass that one."
        )
    assert isinstance(made, DataParallelStrategy)
    chosen = record.setup.get("bucket_mb")  # by measuring, which would come to something else here
    is_given = made.run.options.bucket_mb not in (None, "auto")
    return made if chosen is None or is_given else made.with_options(bucket_mb=chosen)


def _fit(
    module: "pl.LightningModule",
    strategy: DataParallelStrategy,
    shelf: Shelf,
    record: RankRecord,
    callbacks: Sequence[Callback],
) -> BaseException | None:
    trainer = pl.Trainer(
        **QUIET_OPTIONS,
        **record.setup["options"],
        strategy=strategy,
        devices=record.num_ranks,
        callbacks=[*copy.deepcopy(list(callbacks)), Replayer(shelf)],
    )
    try:
        trainer.fit(module, datamodule=RecordedData(shelf))
    except Exception as raised:
        has_begun = any(one.losses or one.state for one in shelf.outcomes.values())
        if not has_begun and isinstance(raised, CheckpointError | ConfigError):
            raise  # the records do not fit the module, or the strategy does not train it
        return raised
    return None


@contextmanager
def _as_recorded(record: RankRecord) -> Iterator[None]:
    """As many threads as a rank had, on which sums depend."""
    before = torch.get_num_threads()
    torch.set_num_threads(record.setup["threads"])
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _notes(record: RankRecord) -> list[str]:
    """Say what differs between the recorded run and this one, for which values may differ."""
    notes = [
        f"{name} was {then}, and is {now} here: values may differ by rounding."
        for name, now in versions(pl).items()
        if (then := record.setup["versions"].get(name)) != now
    ]
    if record.setup["device"] != "cpu":
        notes.append(
            f"it was recorded on {record.setup['device']} and replayed on the CPU: values differ "
            f"by rounding, and random numbers that were drawn on the device are others."
        )
    if record.start != record.step:
        notes.append(
            f"the replay began at step {record.start}, of which the state was kept, and took the "
            f"steps from there."
        )
    return notes
