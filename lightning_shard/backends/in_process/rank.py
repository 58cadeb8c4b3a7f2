"""One rank of a cooperative world: its thread, what it waits for, and where it stands.

A thread keeps its index for good. The rank's number is that of its place, which in an elastic world
changes from one generation of groups to the next.

    thread 0  1  2  3          generation 1: rank 0, 1, 2, 3
    thread 0     2  3  4       generation 2: rank 0,    1, 2, 3
"""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from lightning_shard.backends.in_process.channel import Channel
from lightning_shard.backends.in_process.rank_globals import RankGlobals
from lightning_shard.backends.in_process.verdicts import Verdict

NOT_YET = -1


class Status(Enum):
    """How far a rank has come."""

    PARKED = "a spare, not added yet"
    ALIVE = "running"
    FINISHED = "finished: its function returned"
    FAILED = "failed"
    GONE = "gone: dropped without a word"


def _nothing() -> None:
    """Return None: no reason is known."""


@dataclass(slots=True)
class Wait:
    """Why a rank does not run.

    Args:
        ready: Says whether the wait is over.
        describe: Says what is waited for, with the caller's file and line.
        lost: Returns the error of a wait that can never end, as somebody who has yet to do his part
            never will; else None.
        forsaken: The same, of anybody who might have ended it; asked when nobody can run.
        at_standstill: Called when nobody can run and no time-out runs either; may make `ready`
            true, as a clock would whose hour comes. Returns whether it has changed anything.
        deadline: A time (`time.monotonic`) at which `ready` turns true by itself.
    """

    ready: Callable[[], bool]
    describe: Callable[[], str]
    lost: Callable[[], Verdict | None] = _nothing
    forsaken: Callable[[], Verdict | None] = _nothing
    at_standstill: Callable[[], bool] = bool
    deadline: float | None = None


@dataclass(slots=True, eq=False)
class RankPosition:
    """A rank's place in a generation of groups, and the groups that it has made there.

    Attributes:
        rank: Its number, by which it and the messages go.
        num_ranks: The number of ranks; where a spare rank is alone still, of those that began.
        threads: Those of the default group, in the order of its ranks.
        generation: Number of the generation; 0 until the world is reconfigured.
    """

    rank: int
    num_ranks: int
    threads: tuple[int, ...]
    generation: int = 0
    num_inits: int = 0
    num_made: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)
    channels: list[Channel] = field(default_factory=list)

    @property
    def name(self) -> str:
        """A name for this place's default group, different from all others'."""
        return f"generation {self.generation} of {','.join(map(str, self.threads))}"


class Rank:
    """One rank's place in the schedule.

    Attributes:
        index: Its thread's number, for good.
        left: The last generation that this rank has done with.
        broken: The last generation whose groups have failed on it.
        is_asked_to_leave: At the next boundary, in order.
        failing: What it has raised, once it only waits for what becomes of the others.
    """

    def __init__(self, index: int, own: RankGlobals, place: RankPosition) -> None:
        self.index = index
        self.globals = own
        self.place = place
        self.status = Status.ALIVE
        self.wait: Wait | None = None
        self.verdict: Verdict | None = None
        self.thread_id = 0
        self.left = self.broken = NOT_YET
        self.is_asked_to_leave = False
        self.failing: BaseException | None = None
        self._wake = threading.Lock()
        self._wake.acquire()

    @property
    def name(self) -> str:
        """The rank's number, and its thread's where that is another."""
        return rank_name(self.place.rank, self.index)

    def wake(self) -> None:
        """Let a thread that sleeps in `sleep` go on; called with the token already handed over."""
        with suppress(RuntimeError):  # awake already
            self._wake.release()

    def sleep(self, timeout: float = -1) -> None:
        """Sleep until woken; may wake early, so callers check again."""
        self._wake.acquire(timeout=timeout)

    def describe(self) -> str:
        """Say where this rank is, for an error message."""
        if self.status is Status.ALIVE and self.wait is not None:
            return f"rank {self.name}: {self.wait.describe()}"
        return f"rank {self.name}: {self.status.value}"


def rank_name(number: int, thread: int) -> str:
    """Return what messages call a rank: its number, and its thread's where that is another."""
    return str(number) if number == thread else f"{number} (thread {thread})"
