"""One rank of a cooperative world: its thread, what it waits for, and its number in the world.

A thread keeps its index for good. The rank's number is that of its `RankPosition`, which in an
elastic world changes from one generation of groups to the next. Each rank makes its own errors.

    thread 0  1  2  3          generation 1: rank 0, 1, 2, 3
    thread 0     2  3  4       generation 2: rank 0,    1, 2, 3
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from lightning_shard.backends.in_process.channel import Channel
from lightning_shard.backends.in_process.rank_globals import RankGlobals
from lightning_shard.errors import DeadlockError, RankFailedError

ErrorMaker = Callable[[int, str], Exception]
"""Makes one rank's error from its number and a description of the operation it is in."""


def deadlock_error(report: str, rank: int, operation: str) -> Exception:
    """Make a rank's error of a deadlock: no rank can run; `report` has a line for each rank."""
    return DeadlockError(
        f"Rank {rank} waits for ever in {operation}: no rank can run, and not every rank has "
        f"finished.\n{report}\n"
        "Every rank of a group must make the same calls in the same order: look for a rank "
        "that returned early or took another branch."
    )


def peer_failed_error_maker(failed: str, error: BaseException) -> ErrorMaker:
    """Make the errors of the peers of the rank named `failed`, which raised `error`."""

    def make(rank: int, operation: str) -> Exception:
        made = RankFailedError(
            f"Rank {rank} cannot go on with {operation}: rank {failed} raised "
            f"{type(error).__name__}: {error}\nMend that error first; this one follows from it."
        )
        made.__cause__ = error
        return made

    return make


GONE = "is gone, without a word. Start again from a checkpoint, or go on in a group without it."
LEFT = "has left these groups. Go on in the next generation's."


def lost_error(lost: Sequence[str], what: str, rank: int, operation: str) -> Exception:
    """Make a rank's error of peers that a fault has dropped, or that left their groups or ended."""
    peers = f"rank {', '.join(lost)} {what}"
    return RankFailedError(f"Rank {rank} cannot go on with {operation}: {peers}")


NOT_YET = -1


class Status(Enum):
    """A rank's state between its start and its end."""

    PARKED = "a spare, not added yet"
    ALIVE = "running"
    FINISHED = "finished: its function returned"
    FAILED = "failed"
    GONE = "gone: dropped without a word"


def _nothing() -> None:
    """Return None: the wait is not in vain."""


@dataclass(slots=True)
class Wait:
    """Why a rank does not run.

    Attributes:
        ready: Returns whether the wait is over.
        describe: Returns in words what is waited for, with the caller's file and line.
        lost: Returns what makes the error of a wait that can never end, else None.
        forsaken: Returns the same when any rank that might have ended the wait is lost; asked when
            no rank can run.
        at_standstill: Called when no rank can run; returns whether it has changed anything.
        deadline: Time (of `time.monotonic`) at which `ready` turns true by itself.
    """

    ready: Callable[[], bool]
    describe: Callable[[], str]
    lost: Callable[[], ErrorMaker | None] = _nothing
    forsaken: Callable[[], ErrorMaker | None] = _nothing
    at_standstill: Callable[[], bool] = bool
    deadline: float | None = None


@dataclass(slots=True, eq=False)
class RankPosition:
    """A rank's number in a generation of groups, and the groups that it has made there."""

    rank: int
    num_ranks: int
    threads: tuple[int, ...]
    generation: int = 0
    num_inits: int = 0
    num_made: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)
    channels: list[Channel] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the default group of this generation, different from all others'."""
        return f"generation {self.generation} of {','.join(map(str, self.threads))}"


class Rank:
    """One rank: its thread, its state and its numbers, as the scheduler keeps them."""

    def __init__(self, index: int, own: RankGlobals, place: RankPosition) -> None:
        self.index = index
        self.globals = own
        self.place = place
        self.status = Status.ALIVE
        self.wait: Wait | None = None
        self.make_error: ErrorMaker | None = None
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
        """Return in words what this rank waits for or how it has ended, for an error message."""
        if self.status is Status.ALIVE and self.wait is not None:
            return f"rank {self.name}: {self.wait.describe()}"
        return f"rank {self.name}: {self.status.value}"


def rank_name(number: int, thread: int) -> str:
    """Return what messages call a rank: its number, and its thread's where that is another."""
    return str(number) if number == thread else f"{number} (thread {thread})"
