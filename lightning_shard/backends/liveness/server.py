"""The hub of the ranks that have met, its connections, and what it says of ranks in words."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from selectors import BaseSelector
from time import monotonic
from typing import Any, NamedTuple

from typing_extensions import override

from lightning_shard.backends.authentication.connection import Connection, Message, Served
from lightning_shard.core import settings
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
    """The activity of a rank, by its own clock; a tuple because one is made for each operation."""

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
    """Why a run has to end: what became of the first rank to go."""

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


SERVICE = "lifeline"
Tell = Callable[[int, Message], None]

_WAIT_SECONDS = 20.0  # after which a wait is told of for the first time
_FRESH_SECONDS = 1.0  # in which a rank may come to its first operation and say so
LONGEST_WAIT_SECONDS = 5.0
"""How long a rank that has raised waits for the others to raise at the same place."""


@dataclass
class _Member:
    heard: float
    doing: str = "had not come yet"
    waits: float = 0.0
    has_stopped: bool = False
    has_come: bool = False
    has_left: bool = False
    was_terminated: bool = False
    steps: int | None = None
    raised: Message | None = None
    raised_at: float = 0.0

    def describe(self, now: float) -> str:
        if self.has_left:
            return "had left in order"
        seconds = max(0.0, now - self.heard)
        if self.doing.endswith(FIRST) and seconds > _FRESH_SECONDS:
            return f"had begun, and told nothing of what it did, {seconds:.1f} s ago"
        return f"{self.doing}, {seconds:.1f} s ago"


class Hub:
    """Rank 0's knowledge of all ranks, and the messages that it sends them.

        rank 1 ──beat, raised, past, failed, terminating, hold, bye──> hub
        rank 1 <──welcome, beat, table, raised, common, hold, stop, verdict, bye── hub

    The hub knows no sockets and no clock: it is told what comes in and what time it is. The first
    rank to die, to fall silent or to raise makes the verdict; later events change nothing.

    A rank that has raised is given a moment: where all have, at the same place, they are told that
    it is *common*, and their groups still work. Told of the first, a rank that waits *past* that
    place says so, and the verdict comes at once.

    A SIGTERM is no failure yet. Told to *hold*, each rank answers how many steps it has begun and
    waits before the step after the next; the hub then has all of them *stop* where the foremost
    will be. So does SLURM's signal before it requeues the job. A rank that does not come to its
    next step within the grace gets the verdict. Where rank 0 leaves in order, the hub is over.
    """

    def __init__(
        self,
        world_size: int,
        silence_seconds: float,
        tell: Tell,
        now: float,
        grace_seconds: float = 30.0,
    ) -> None:
        self._members = {rank: _Member(heard=now) for rank in range(world_size)}
        self.silence_seconds = silence_seconds
        self.is_over = False
        self._tell = tell
        self._grace_seconds = grace_seconds
        self._told_waits = _WAIT_SECONDS
        self._terminated: int | None = None
        self._held_since = math.inf
        self._requeues: Message = {}  # what the ranks are told of it
        self._announced: dict[str, Message] = {}  # by kind, for those who come late

    def expects(self, rank: int) -> bool:
        """Whether it is one of the ranks that meet."""
        return rank in self._members

    def heard(self, rank: int, message: Message, now: float) -> None:
        """Take note of a message that has come from `rank`."""
        member = self._members[rank]
        member.heard, member.has_come = now, True
        match message["kind"]:
            case "join":
                for announcement in self._announced.values():
                    self._tell(rank, announcement)
                if all(one.has_come for one in self._members.values()):
                    self._announce({"kind": "welcome"})
            case "beat":
                member.doing, member.waits = f"was {message['doing']}", message.get("waits", 0.0)
            case "ask":
                self._tell(rank, {"kind": "table", "table": self.table(now)})
            case "failed" | "raised" | "past":
                self._hear_of_failure(rank, message, now)
            case "terminating":
                self._hold(rank, now, requeues="requeues" in message)
            case "hold" | "stopped" | "bye":
                member.steps = message.get("steps", member.steps)
                member.has_stopped |= message["kind"] == "stopped"
                member.has_left |= message["kind"] == "bye"
                self._stop_when_all_hold()
                if rank == 0 and member.has_left:
                    self._end()

    def _hear_of_failure(self, rank: int, message: Message, now: float) -> None:
        member = self._members[rank]
        match message["kind"]:
            case "failed":
                self._judge(rank, message["event"], now)
            case "raised":
                member.raised, member.raised_at = message, now
                self._compare_failures(now)
            case "past":
                self._judge_first(now)

    def _compare_failures(self, now: float) -> None:
        """Say that all ranks have raised at the same place, or which rank has done so alone."""
        raised = [one.raised for one in self._members.values() if not one.has_left]
        places = [one["place"] for one in raised if one is not None]
        if any(place != places[0] for place in places) or len(raised) < len(self._members):
            self._judge_first(now)
        elif len(places) == len(self._members):
            self._announce({"kind": "common"})
        else:
            number = next(one["number"] for one in raised if one is not None)
            self._announce({"kind": "raised", "number": number})

    def _judge_first(self, now: float) -> None:
        """Give the verdict on the first that has raised, unless all have."""
        raised = [(m.raised_at, r) for r, m in self._members.items() if m.raised is not None]
        if raised and "common" not in self._announced:
            rank = min(raised)[1]
            message = self._members[rank].raised
            assert message is not None
            self._judge(rank, message["event"], now)

    def lost(self, rank: int, now: float) -> None:
        """Take note that the connection of `rank` has ended."""
        member = self._members[rank]
        if not member.has_left:
            self._judge(rank, "died" + " after SIGTERM" * member.was_terminated, now)

    def tick(self, now: float) -> None:
        """Send everybody a beat and look who has been silent for too long."""
        for rank, member in self._members.items():
            if not member.has_left and now - member.heard > self.silence_seconds:
                self._judge(rank, f"fell silent for {now - member.heard:.1f} s", now)
        if any(
            m.raised and now - m.raised_at > LONGEST_WAIT_SECONDS for m in self._members.values()
        ):
            self._judge_first(now)
        if now - self._held_since > self._grace_seconds:
            self._judge_who_does_not_stop(now)
        self._tell_of_waits(now)
        self._tell_all({"kind": "beat"})

    def _judge_who_does_not_stop(self, now: float) -> None:
        late = [r for r, m in self._members.items() if not (m.has_stopped or m.has_left)]
        late.sort(key=lambda one: self._members[one].waits)  # who computes is waited for
        if late:
            event = f"{NO_STEP} within {self._grace_seconds:g} s after rank {self._terminated}"
            others = "; ".join(f"rank {r} {self._members[r].describe(now)}" for r in late[1:])
            self._judge(late[0], f"{event} received SIGTERM", now, others)

    def _tell_of_waits(self, now: float) -> None:
        longest = max(
            (one.waits for one in self._members.values() if not one.has_left), default=0.0
        )
        if longest > self._told_waits:
            self._told_waits *= 2
            ranks = [f"rank {rank} {doing}" for rank, doing in self.table(now).items()]
            self._tell(0, {"kind": "waiting", "ranks": ranks})

    def forgive(self, now: float) -> None:
        """Start everybody's time anew: this process itself was not running for a while."""
        for member in self._members.values():
            member.heard = now

    def _end(self) -> None:
        """Tell all that rank 0 leaves in order, and rank 0 last, which waits for the word."""
        self.is_over = True
        for rank in reversed(self._members):
            self._tell(rank, {"kind": "bye"})

    def table(self, now: float) -> dict[str, str]:
        """Return in words what each rank was last doing, by rank."""
        return {str(rank): member.describe(now) for rank, member in self._members.items()}

    def _judge(self, rank: int, event: str, now: float, others: str = "") -> None:
        doing = "; ".join(filter(None, (f"it {self._members[rank].describe(now)}", others)))
        self._announce({"kind": "verdict", "rank": rank, "event": event, "doing": doing})

    def _hold(self, rank: int, now: float, *, requeues: bool) -> None:
        self._members[rank].was_terminated |= not requeues
        if requeues:
            self._requeues = {"requeues": True}
        else:
            self._held_since = min(self._held_since, now)
        if self._terminated is None:
            self._terminated = rank
            self._announce({"kind": "hold", "rank": rank, **self._requeues})

    def _stop_when_all_hold(self) -> None:
        steps = [member.steps for member in self._members.values() if not member.has_left]
        known = [count for count in steps if count is not None]
        if self._terminated is not None and len(known) == len(steps):
            step = max(known, default=0) + 1
            stop = {"kind": "stop", "rank": self._terminated, "step": step}
            self._announce({**stop, **self._requeues})

    def _announce(self, message: Message) -> None:
        """Tell everybody, once for each kind."""
        if message["kind"] not in self._announced:
            self._announced[message["kind"]] = message
            self._tell_all(message)

    def _tell_all(self, message: Message) -> None:
        for rank, member in self._members.items():
            if not member.has_left:
                self._tell(rank, message)


class HubService(Served):
    """Serves a `Hub` to the ranks of each meeting, which say first who they are, and of which."""

    def __init__(self, selector: BaseSelector) -> None:
        super().__init__(selector)
        self._hubs: dict[str, Hub] = {}

    @property
    @override
    def tick_seconds(self) -> float:
        beats = (hub.silence_seconds / 7 for hub in self._hubs.values())
        return min([super().tick_seconds, *beats])

    @override
    def tick(self, now: float, seconds: float) -> None:
        for hub in self._hubs.values():
            if seconds > hub.silence_seconds / 2:  # this process was stopped
                hub.forgive(now)
            hub.tick(now)

    @override
    def _take(self, connection: Connection, message: Message) -> bool:
        now = monotonic()
        if self._owners[connection] is None and not self._is_let_in(connection, message, now):
            return False
        meeting, rank = self._owners[connection]
        if rank == 0 and message["kind"] == "bye":
            for other in [one for one in self._owners if one is not connection]:
                self._read(other)  # what has come before is heard before the end
        if (hub := self._hubs.get(meeting)) is not None:  # else rank 0 has left
            hub.heard(rank, message, now)
            if hub.is_over:
                del self._hubs[meeting]
        return True

    def _is_let_in(self, connection: Connection, message: Message, now: float) -> bool:
        """Return whether the message is one of a rank that comes, of which there is none yet."""
        meeting, rank = message["meeting"], message["rank"]
        hub = self._hubs.get(meeting) or Hub(
            message["world_size"],
            float(message["silence_seconds"]),
            lambda rank, told: self._tell((meeting, rank), told),
            now,
            settings.grace_seconds(),
        )
        if (meeting, rank) in self._connections or not hub.expects(rank):
            return False
        self._hubs[meeting] = hub
        self._know(connection, (meeting, rank))
        return True

    @override
    def _lost(self, connection: Connection, owner: Any) -> None:
        meeting, rank = owner or ("", 0)
        if meeting in self._hubs:
            self._hubs[meeting].lost(rank, monotonic())
