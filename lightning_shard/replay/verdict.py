"""What a replay has found: whether the failure came again, and whether the values are the same."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_shard.errors import RankFailedError
from lightning_shard.replay.group_of_one import Outcome
from lightning_shard.replay.rank_record import RankRecord, bits

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
