"""The table of an elastic job's members, which decides when a generation is formed.

    member ──join, beat, arrive, ready, leave──> table <── lost, tick (from whoever serves it)
    member <──generation, go, lost, wanted, waiting, late, declared_dead, evicted, over── table

The table knows no sockets and no clock, as `backends.liveness.server.Hub` does not. A generation is
formed as soon as every living member of the last one has arrived: those, by seniority, and the
newcomers that have arrived, up to `max_ranks`; the rest waits as spares. The first is formed of the
initial ranks. With fewer than `min_ranks` the table waits, and after `patience_seconds` forms a
last generation, which saves and ends. The messages that it tells, each with its "kind":

    generation  number, members, is_last, reason: the next generation, of which the told one is
    go          generation: all of its members are ready to make its groups
    lost        generation, member, rank, event: a member has gone, or cannot go on as it was
    wanted      is_wanted: whether a newcomer waits for which there is room
    waiting     text: what is waited for
    late        the job has begun without this initial rank, which is a newcomer now
    declared_dead  member, event: taken for lost, though it hears this; it may join again
    evicted     failures, error: the job goes on without this rank, or ends for all
    over        the job has ended
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Tell = Callable[[str, dict[str, Any]], None]

SHORTEST_START_SECONDS = 60.0  # one rank may import for long on a busy host


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How many ranks may train, how long too few wait, and how often one may fail.

    Attributes:
        max_ranks: The greatest number of ranks that train; None for no bound.
        patience_seconds: How long ranks wait below `min_ranks` before they save and end.
        max_failures: A member that fails more often is evicted.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    patience_seconds: float = 60.0
    max_failures: int = 3


@dataclass(kw_only=True)
class _Participant:
    """A member of the last generation, or one that waits for the next."""

    heard: float
    initial_rank: int | None = None
    has_arrived: bool = False
    error: str | None = None
    failures: int = 0
    has_been_told_to_wait: bool = False


class MembershipTable:
    """The participants of one job.

    `tell` sends a message to one that can be reached. Each method is told the time by a clock that
    only goes forward.
    """

    def __init__(
        self, bounds: Bounds, *, initial_size: int, silence_seconds: float, tell: Tell, now: float
    ) -> None:
        self.number = 0
        self.members: tuple[str, ...] = ()
        self.is_over = False
        self._bounds = bounds
        self._initial_size = initial_size
        self._silence_seconds = silence_seconds
        self._tell = tell
        self._start_deadline = now + max(SHORTEST_START_SECONDS, bounds.patience_seconds)
        self._participants: dict[str, _Participant] = {}
        self._newcomers: list[str] = []  # that have arrived, in that order
        self._ready: set[str] = set()
        self._num_names: dict[str, int] = {}
        self._events: list[str] = []  # since the last generation was formed
        self._waiting_since: float | None = None
        self._is_wanted = False
        self._is_ending = False
        self._has_finished = False  # a member has trained to the end

    @property
    def living(self) -> tuple[str, ...]:
        """Everybody who is there, members and those that wait, in the order they came."""
        return tuple(self._participants)

    def is_there(self, member: str) -> bool:
        """Whether a participant of this id is a member or waits."""
        return member in self._participants

    # --- messages -------------------------------------------------------------------------------

    def join(self, name: str, initial_rank: int | None, now: float) -> str:
        """Take in an initial rank, or a newcomer, which arrives when it is ready; return its id."""
        self._num_names[name] = count = self._num_names.get(name, 0) + 1
        member = name if count == 1 else f"{name}/{count}"
        self._participants[member] = _Participant(heard=now)
        if self.is_over:
            self._tell(member, {"kind": "over"})
        elif initial_rank is not None and (self.number or initial_rank in self._initial_ranks()):
            self._tell(member, {"kind": "late"})
        else:
            self._participants[member].initial_rank = initial_rank
        self._proceed(now)
        return member

    def beat(self, member: str, now: float) -> None:
        """Take note that a participant lives."""
        if member in self._participants:
            self._participants[member].heard = now
        else:
            again = {"member": member, "event": "was given up before"}
            self._tell(member, {"kind": "declared_dead"} | again)

    def arrive(self, member: str, generation: int, error: str | None, now: float) -> None:
        """Take note that a member waits for the generation after this one; a newcomer says 0."""
        self.beat(member, now)
        one = self._participants.get(member)
        is_member = member in self.members
        if one is None or one.has_arrived or generation != (self.number if is_member else 0):
            return
        one.has_arrived = True
        if is_member and error is not None:
            one.error, one.failures = error, one.failures + 1
            self._tell_of_loss(member, f"raised {error}")
        elif not is_member:
            self._newcomers.append(member)
        self._proceed(now)

    def ready(self, member: str, generation: int, now: float) -> None:
        """Take note that a member is about to make the groups of this generation."""
        self.beat(member, now)
        if generation != self.number or member not in self.members:
            return
        self._ready.add(member)
        if self._ready.issuperset(self.members):
            self._tell_each(self.members, {"kind": "go", "generation": generation})

    def leave(self, member: str, is_done: bool, now: float) -> None:
        """Take note that a participant leaves in order; if it `is_done`, nobody needs to go on."""
        if self._remove(member) and member in self.members:
            self._has_finished = self._has_finished or is_done
            self._events.append(f"{self._describe(member)} left")
        self._proceed(now)

    def lost(self, member: str, now: float, event: str = "died") -> None:
        """Take note that a participant has gone without a goodbye; nothing if it left before."""
        if not self._remove(member):
            return
        if member in self.members:
            self._tell_of_loss(member, event)
        self._proceed(now)

    def tick(self, now: float) -> None:
        """Declare dead who has been silent for too long, and see whose patience has ended."""
        for member, one in list(self._participants.items()):
            if (silent := now - one.heard) > self._silence_seconds:
                event = f"fell silent for {silent:.1f} s"
                self.lost(member, now, event)
                self._tell(member, {"kind": "declared_dead", "member": member, "event": event})
        self._proceed(now)

    def forgive(self, now: float) -> None:
        """Count everybody's silence from now on: who serves the table did not run for a while."""
        for one in self._participants.values():
            one.heard = now

    # --- generations ----------------------------------------------------------------------------

    def _proceed(self, now: float) -> None:
        """Form a generation if it is time, and tell those concerned what has changed."""
        self._end_if_nobody_goes_on()
        if not self.is_over and self._all_have_arrived(now):
            self._evict_failing()
            self._form_if_enough(now)
            self._end_if_nobody_goes_on()
        self._tell_whether_wanted()

    def _all_have_arrived(self, now: float) -> bool:
        if self.number:
            return all(self._participants[one].has_arrived for one in self._living_members())
        return len(self._initial()) >= self._initial_size or now >= self._start_deadline

    def _evict_failing(self) -> None:
        """Evict who has failed too often, or all when all have failed: that is no accident."""
        living = self._living_members()
        errors = [self._participants[one].error for one in living]
        all_failed = bool(living) and len(living) == len(self.members) and None not in errors
        self.is_over = self.is_over or all_failed
        for member, error in zip(living, errors, strict=True):
            failures = self._participants[member].failures
            if error is not None and (all_failed or failures > self._bounds.max_failures):
                self._remove(member)
                self._events.append(f"{self._describe(member)} was evicted")
                self._tell(member, {"kind": "evicted", "failures": failures, "error": error})
            elif error is not None:
                self._participants[member].error = None  # forgiven; it stays counted

    def _form_if_enough(self, now: float) -> None:
        waiting, spares = [*self._living_members(), *self._initial()], list(self._newcomers)
        # The first generation sets itself up together, as a newcomer has done alone.
        if not self._is_ending and (self.number or not waiting):
            waiting, spares = [*waiting, *spares], []
        if self.is_over or not waiting:
            self._waiting_since = None
            return
        if len(waiting) + len(spares) < self._bounds.min_ranks and not self._is_ending:
            if self._waiting_since is None:
                self._waiting_since = now
            if now - self._waiting_since < self._bounds.patience_seconds:
                num_ranks, least = len(waiting + spares), self._bounds.min_ranks
                self._tell_to_wait(
                    waiting + spares,
                    f"waits for {least - num_ranks} more rank(s): has {num_ranks}, min_ranks="
                    f"{least}; ends in {self._bounds.patience_seconds:.0f} s",
                )
                return
            self._is_ending = True
        self._form(waiting[: self._bounds.max_ranks])

    def _form(self, members: list[str]) -> None:
        num_new = sum(one in self._newcomers for one in members)
        if num_new:
            self._events.append(f"{num_new} rank(s) joined")
        self.number, self.members = self.number + 1, tuple(members)
        for one in self._initial():
            if one not in members:  # above max_ranks
                self._tell(one, {"kind": "late"})
        self._newcomers = [one for one in self._newcomers if one not in members]
        for participant in self._participants.values():
            participant.initial_rank = None
        for member in members:
            self._participants[member].has_arrived = False
            self._participants[member].has_been_told_to_wait = False
        formed = {"kind": "generation", "number": self.number, "members": members}
        rest = {"is_last": self._is_ending, "reason": "; ".join(self._events)}
        self._events, self._ready = [], set()
        self._waiting_since, self._is_wanted = None, False
        self._tell_each(members, formed | rest)

    def _end_if_nobody_goes_on(self) -> None:
        was_over = self.is_over
        if self.number and not self._living_members():
            self.is_over = self.is_over or self._has_finished or self._is_ending
        if self.is_over:
            if not was_over or self._newcomers:
                self._tell_each(self._newcomers, {"kind": "over"})
            self._newcomers = []

    def _tell_whether_wanted(self) -> None:
        members = self._living_members()
        has_room = self._bounds.max_ranks is None or len(members) < self._bounds.max_ranks
        is_wanted = bool(self._newcomers) and has_room and not self._is_ending
        if is_wanted != self._is_wanted:
            self._is_wanted = is_wanted
            self._tell_each(members, {"kind": "wanted", "is_wanted": is_wanted})
        if not self.number:
            self._tell_to_wait(self._newcomers, "waits for the job's first ranks")
        elif members and self._is_ending:
            text = "the job ends: too few ranks were there for too long"
            self._tell_to_wait(self._newcomers, text)
        elif members and not has_room:
            self._tell_to_wait(
                self._newcomers, f"max_ranks={self._bounds.max_ranks} train; waits for one"
            )

    # --- people ---------------------------------------------------------------------------------

    def _living_members(self) -> list[str]:
        return [member for member in self.members if member in self._participants]

    def _initial(self) -> list[str]:
        """Those that wait for generation 1, in the order of their ranks."""
        ranks = self._initial_ranks()
        return [ranks[rank] for rank in sorted(ranks)]

    def _initial_ranks(self) -> dict[int, str]:
        return {
            one.initial_rank: member
            for member, one in self._participants.items()
            if one.initial_rank is not None
        }

    def _remove(self, member: str) -> bool:
        if member in self._newcomers:
            self._newcomers.remove(member)
        one = self._participants.pop(member, None)
        self._initial_size -= one is not None and one.initial_rank is not None
        return one is not None

    def _tell_of_loss(self, member: str, event: str) -> None:
        """Tell the others of its generation, who may wait for it."""
        self._events.append(f"{self._describe(member)} {event}")
        lost = {"member": member, "rank": self.members.index(member), "event": event}
        others = [one for one in self._living_members() if one != member]
        self._tell_each(others, {"kind": "lost", "generation": self.number} | lost)

    def _describe(self, member: str) -> str:
        return f"rank {self.members.index(member)} (member {member})"

    def _tell_to_wait(self, members: Iterable[str], text: str) -> None:
        for member in members:
            if not self._participants[member].has_been_told_to_wait:
                self._participants[member].has_been_told_to_wait = True
                self._tell(member, {"kind": "waiting", "text": text})

    def _tell_each(self, members: Iterable[str], message: dict[str, Any]) -> None:
        for member in list(members):
            self._tell(member, message)
