"""Takes a recorded step again, with all its ranks as threads of this process."""

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_shard.backends.in_process.channel import like_gloo
from lightning_shard.errors import CheckpointError, ConfigError, RankFailedError
from lightning_shard.replay.group_of_one import Outcome, RecordedData, Replayer, Shelf, alone
from lightning_shard.replay.rank_record import RankRecord, bits, read_record, read_records, versions
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.names import strategy_name
from lightning_shard.tools.proving.strategies import (
    QUIET_OPTIONS,
    StrategyLike,
    quiet,
    strategy_in_process,
)

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
