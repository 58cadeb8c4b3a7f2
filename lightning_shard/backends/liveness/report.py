"""Descriptions of ranks in words: each one's last activity, and the end of the first to go."""

from dataclasses import dataclass
from typing import NamedTuple

from lightning_shard.errors import RankFailedError

Table = dict[int, str]
"""By rank, its last activity as the hub knows it: `{1: "was computing for 2.0 s, ..."}`."""

NO_STEP = "came to no next step"

_ADVICE = {
    "died": "Look for the cause in that rank's output and its host's log (out of memory?)",
    "fell silent": "Look whether its process is stopped, or its host or the network down",
    "raised": "Mend the cause, which that rank's own output shows in full",
    NO_STEP: "Look for what it waits for, which the ranks' own lines tell; a step that may take "
    "longer needs a larger LIGHTNING_SHARD_GRACE_SECONDS",
    "received SIGTERM": "Somebody ended the job, its scheduler for example",
}

FIRST = "before its first operation"


class Activity(NamedTuple):
    """The activity of a rank; a tuple because one is made for each operation.

    Attributes:
        operation: The operation that it is in, or was in last; "" before the first.
        number: How many operations it has entered.
        inside: Whether it is in the operation still; else it computes.
        since: When it entered or left that operation, in seconds on the rank's own clock.
    """

    operation: str = ""
    number: int = 0
    inside: bool = False
    since: float = 0.0

    def describe(self, now: float) -> str:
        """Say in words what the rank is doing: "in all_reduce (its operation 12) for 0.3 s"."""
        seconds = f"for {max(0.0, now - self.since):.1f} s"
        if self.inside:
            return f"in {self.operation} (its operation {self.number}) {seconds}"
        if self.number:
            return f"computing {seconds} after {self.operation} (its operation {self.number})"
        if self.operation:
            return f"computing {seconds} after {self.operation}"
        return f"computing {seconds} {FIRST}"


@dataclass(frozen=True, kw_only=True)
class LivenessVerdict:
    """Why a run has to end: what became of the first rank to go.

    Attributes:
        rank: Global rank of the first to go.
        event: "died", "fell silent ...", "raised ValueError: ...", "received SIGTERM".
        doing: What that rank was last known to be doing, in words.
    """

    rank: int
    event: str
    doing: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.event}; {self.doing}"

    @property
    def is_timeout(self) -> bool:
        """Whether somebody was waited for in vain: why, only that rank's own stacks tell."""
        return self.event.startswith(("fell silent", NO_STEP, f"raised {RankFailedError.__name__}"))

    @property
    def advice(self) -> str:
        """What the user should do about this end, as a sentence."""
        for event, advice in _ADVICE.items():
            if self.event.startswith(event):
                return f"{advice}; then go on from the last checkpoint."
        return "Go on from the last checkpoint."


def failure_message(rank: int, size: int, operation: str, verdict: LivenessVerdict) -> str:
    """Return the error's text on `rank`, which a verdict has kept from its operation."""
    if verdict.rank == rank:
        return (
            f"Rank {rank} of {size} cannot go on with {operation}: this rank itself "
            f"{verdict.event}, and its peers have given it up."
        )
    return f"Rank {rank} of {size} lost a peer in {operation}: {verdict}. {verdict.advice}"


def late_message(rank: int, size: int, operation: str, table: Table) -> str:
    """Return the error's text when an operation failed and no rank is known to have failed."""
    others = "; ".join(f"rank {other} {doing}" for other, doing in table.items() if other != rank)
    return (
        f"Rank {rank} of {size} lost a peer in {operation}: a rank of its group has not come in "
        f"time, or has left. What the others were last doing: {others or 'unknown'}. Look for one "
        "that computes for long or is in another operation than the rest; raise the timeout where "
        "that is right."
    )
