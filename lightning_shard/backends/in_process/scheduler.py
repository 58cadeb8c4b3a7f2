"""The token of a cooperative world: which rank runs, and what happens when none can.

Ranks are threads, and one runs until it must wait; then the next rank, round-robin, whose wait is
over. So the order is the same on every run. Rank 0 is the caller's own thread.

    rank 0   run ──wait┐                 ┌──run
    rank 1             └─run ──wait┐     │
    rank 2                         └─run ┘

When no rank can run and some rank has not finished, that is a deadlock: every waiting rank gets an
error. So do the peers of a rank that raises; in an elastic world only those that wait for it.

A rank that has raised learns here whether the others have, before it tells them of its error: where
all have, after the same collective calls, they can still save together.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from lightning_shard.backends.in_process.channel import Channel
from lightning_shard.backends.in_process.faults import RankDropped
from lightning_shard.backends.in_process.rank import (
    ErrorMaker,
    Rank,
    RankPosition,
    Status,
    Wait,
    deadlock_error,
    peer_failed_error_maker,
)
from lightning_shard.core.states import setting
from lightning_shard.errors import ConfigError

_STOP_GRACE_SECONDS = 1.0
_LOOK_UP_SECONDS = 0.2
_MAX_IDLE_POLLS = 20_000  # far more than anybody polls who has work of his own to do meanwhile
_MAX_IDLE_POLLS_OF_A_FAILED = 500


class Scheduler:
    """Holds the token and passes it on."""

    def __init__(self, ranks: list[Rank], *, is_elastic: bool = False) -> None:
        self.ranks = ranks
        self.running = ranks[0]
        self.failures: dict[int, BaseException] = {}
        self.survived: set[int] = set()
        self.is_condemned = False
        self.is_elastic = is_elastic
        self._idle_polls = 0

    # --- waiting -------------------------------------------------------------------------------

    def wait(self, wait: Wait) -> None:
        """Let the other ranks run until `wait` is over, or raise when it can never be."""
        rank = self.check_thread()
        if wait.ready():
            return
        self._raise_if_doomed(rank, wait)
        with setting(rank, wait=wait):
            while True:
                self._hand_over(rank)
                if wait.ready():
                    self.note_progress()
                    return
                self._raise_if_doomed(rank, wait)

    def yield_token(self, describe: Callable[[], str]) -> None:
        """Let each runnable rank run once."""
        rank = self.check_thread()
        self._idle_polls += 1
        with setting(rank, wait=Wait(ready=lambda: True, describe=describe)):
            if self._idle_polls > _MAX_IDLE_POLLS_OF_A_FAILED:
                self._end_standstill([one for one in self.ranks if one.failing is not None])
            if self._idle_polls > _MAX_IDLE_POLLS and not self._deadlines():
                self.condemn(partial(deadlock_error, self._report()))
                self.raise_if_condemned(rank, describe)
            self._hand_over(rank)

    def note_progress(self) -> None:
        """Record that a rank did something that others may wait for."""
        self._idle_polls = 0

    def check_thread(self) -> Rank:
        """Return the running rank."""
        rank = self.running
        if threading.get_ident() != rank.thread_id:
            raise ConfigError(
                f"A collective was called from thread {threading.current_thread().name!r}, which "
                f"is not that of the running rank {rank.index}. In an in-process world a rank's "
                "collectives must come from its own thread, not from a helper thread or a signal "
                "handler."
            )
        return rank

    def raise_if_condemned(self, rank: Rank, describe: Callable[[], str]) -> None:
        """Raise the error that this rank is condemned to, if any."""
        if rank.status is Status.GONE:
            raise RankDropped
        if rank.make_error is not None:
            raise rank.make_error(rank.place.rank, describe())

    def _raise_if_doomed(self, rank: Rank, wait: Wait) -> None:
        self.raise_if_condemned(rank, wait.describe)
        if (make_error := wait.lost()) is not None:
            raise make_error(rank.place.rank, wait.describe())

    # --- ending --------------------------------------------------------------------------------

    def condemn(self, make_error: ErrorMaker) -> None:
        """Have every live rank raise the error of `make_error` at its next operation."""
        self.is_condemned = True
        for rank in self.ranks:
            if rank.status is Status.ALIVE and rank.make_error is None:
                rank.make_error = make_error

    def fail(self, rank: Rank, error: BaseException) -> None:
        """Record that `rank` raised; its peers will raise `RankFailedError`.

        In an elastic world only those that wait for it do; Ctrl-C or a test's failure ends all.
        """
        self.failures.setdefault(rank.index, error)
        rank.status = Status.FAILED
        if self.is_elastic and isinstance(error, (Exception, SystemExit)):
            if not self.is_condemned:
                self.survived.add(rank.index)
        else:
            self.condemn(peer_failed_error_maker(rank.name, error))

    def await_failures(self, rank: Rank, error: BaseException) -> None:
        """Let the other ranks run until each has raised, too, or has ended; called by `rank`.

        Those that wait in vain get the error that follows from this one; elastic ones go on once
        this rank has ended.
        """
        rank.failing = error
        self.failures.setdefault(rank.index, error)
        self.note_progress()
        released: list[bool] = []

        def end_standstill() -> bool:
            if self.is_elastic:
                released.append(True)
            return self.is_elastic or self._end_with(rank, error)

        wait = Wait(
            lambda: bool(released) or self.is_condemned or self._nobody_goes_on(),
            lambda: f"the others' end, since it has raised {type(error).__name__}: {error}",
            at_standstill=end_standstill,
        )
        with setting(rank, wait=wait):
            while not wait.ready():
                self._hand_over(rank)

    def _nobody_goes_on(self) -> bool:
        return all(r.failing is not None for r in self.ranks if r.status is Status.ALIVE)

    def _end_with(self, rank: Rank, error: BaseException) -> bool:
        """Have the ranks that wait in vain raise the error that follows from this rank's."""
        make_error = peer_failed_error_maker(rank.name, error)
        going = [r for r in self.ranks if r.status is Status.ALIVE and r.failing is None]
        for other in going:
            other.make_error = other.make_error or make_error
        return bool(going)

    def interrupt(self, rank: Rank, error: BaseException) -> None:
        """Record that Ctrl-C or an alarm has struck the caller's thread, which ends all ranks."""
        self.fail(rank, error)
        self.condemn(peer_failed_error_maker(rank.name, error))

    def leave(self, rank: Rank) -> None:
        """Hand the token on for good, from a thread that is about to end."""
        self._give_token(rank, self._choose(rank))

    def drain(self, rank: Rank) -> None:
        """Let the other ranks run until all have ended; for rank 0, which has ended itself."""
        while any(other.status is Status.ALIVE for other in self.ranks):
            try:
                self._hand_over(rank)
            except BaseException as error:
                self.interrupt(rank, error)

    # --- the token -----------------------------------------------------------------------------

    def _hand_over(self, rank: Rank) -> None:
        """Give the token to the next runnable rank and sleep until it is back."""
        try:
            following = self._choose(rank)
            if following is not rank:
                self._give_token(rank, following)
                self.sleep_until_running(rank)
        except BaseException as error:
            # Ctrl-C or a test's alarm: only the caller's thread, rank 0, ever gets here.
            self._recover_token(rank, error)
            raise

    def _give_token(self, rank: Rank, following: Rank) -> None:
        rank.globals.save()
        following.globals.load()
        self.running = following
        following.wake()

    def sleep_until_running(self, rank: Rank) -> None:
        """Sleep until this rank has the token; rank 0 looks up, as a signal may not wake it."""
        seconds = _LOOK_UP_SECONDS if rank.index == 0 else -1
        while self.running is not rank:
            rank.sleep(seconds)

    def _recover_token(self, rank: Rank, error: BaseException) -> None:
        """End the world and get the token back, wherever the interruption struck."""
        if self.running is rank:  # not given away, or just come back
            rank.globals.load()
            return
        self.interrupt(rank, error)
        rank.make_error = peer_failed_error_maker(rank.name, error)
        self.running.wake()  # the interruption may have come just before
        while (running := self.running) is not rank:
            with suppress(BaseException):  # more of the same
                rank.sleep(_STOP_GRACE_SECONDS)
                if self.running is running and running is not rank:
                    self._abandon(running, rank)

    def _abandon(self, stuck: Rank, rank: Rank) -> None:
        """Take the token from a rank that does not come back, and end its thread if possible."""
        stuck.status = Status.FAILED
        self.running = rank
        rank.globals.load()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(stuck.thread_id), ctypes.py_object(SystemExit)
        )

    def _choose(self, after: Rank) -> Rank:
        """Pick the rank to run next: the first after `after` whose wait is over."""
        while True:
            if (found := self._find_runnable(after)) is not None:
                return found
            waiting = [r for r in self.ranks if r.status is Status.ALIVE and r.wait is not None]
            if not waiting:
                return self.ranks[0]  # all have ended: back to the caller's thread
            if deadlines := self._deadlines():
                time.sleep(max(0.0, min(deadlines) - time.monotonic()))
            elif not (self._give_up_the_forsaken(waiting) or self._end_standstill(waiting)):
                self.condemn(partial(deadlock_error, self._report()))

    def _deadlines(self) -> list[float]:
        waits = [rank.wait for rank in self.ranks if rank.status is Status.ALIVE]
        return [wait.deadline for wait in waits if wait and wait.deadline is not None]

    def _report(self) -> str:
        return "\n".join(f"  {rank.describe()}" for rank in self.ranks)

    def _give_up_the_forsaken(self, waiting: list[Rank]) -> bool:
        """End the waits that a lost rank might have ended; return whether there were any."""
        forsaken = [(r.wait, v) for r in waiting if r.wait and (v := r.wait.forsaken()) is not None]
        for wait, make_error in forsaken:
            wait.lost = partial(_always, make_error)
        return bool(forsaken)

    def _end_standstill(self, waiting: list[Rank]) -> bool:
        """Tell the waits, failing ranks' first, of the standstill; return whether one ended it."""
        in_turn = sorted(waiting, key=lambda rank: rank.failing is None)
        return any(rank.wait.at_standstill() for rank in in_turn if rank.wait is not None)

    def _find_runnable(self, after: Rank) -> Rank | None:
        size = len(self.ranks)
        for step in range(1, size + 1):
            rank = self.ranks[(after.index + step) % size]
            if rank.status is Status.ALIVE and self._can_run(rank):
                return rank
        return None

    def _can_run(self, rank: Rank) -> bool:
        wait = rank.wait
        if wait is None or wait.ready():
            return True
        waits_for_ends = rank.failing is not None and not self.is_condemned
        return (rank.make_error is not None and not waits_for_ends) or wait.lost() is not None


def _always(make_error: ErrorMaker) -> ErrorMaker:
    return make_error


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The state of all ranks that a failing rank finds."""

    is_common: bool
    first: BaseException
    gone: tuple[int, ...]


class Failures:
    """The place where the ranks that have raised wait for each other."""

    def __init__(self, scheduler: Scheduler, channels: Collection[Channel]) -> None:
        self._scheduler, self._channels = scheduler, channels
        self._is_common: dict[int, bool] = {}  # by generation

    def meet(self, rank: Rank, error: BaseException) -> Failure:
        """Let the other ranks run until each has raised, too, or has ended; called by `rank`."""
        scheduler, place = self._scheduler, rank.place
        if not scheduler.is_elastic or rank.left < place.generation:
            scheduler.await_failures(rank, error)
            if place.generation not in self._is_common:  # the first to come back looks for all
                self._is_common[place.generation] = self._have_failed_alike(place)
        thread, first = next(iter(scheduler.failures.items()), (rank.index, error))
        is_common = self._is_common.get(place.generation, False) and not scheduler.is_condemned
        if not is_common and not scheduler.is_elastic:
            scheduler.condemn(peer_failed_error_maker(scheduler.ranks[thread].name, first))
        gone = tuple(r for r, one in enumerate(self._members(place)) if one.status is Status.GONE)
        return Failure(is_common=is_common, first=first, gone=gone)

    def is_common(self, rank: Rank, error: BaseException) -> bool:
        """Whether all ranks raise where `rank` has; if not, `rank` may go on."""
        if self.meet(rank, error).is_common:
            return True
        rank.failing = None
        self._scheduler.failures.pop(rank.index, None)
        return False

    def _members(self, place: RankPosition) -> list[Rank]:
        return [self._scheduler.ranks[thread] for thread in place.threads]

    def _have_failed_alike(self, place: RankPosition) -> bool:
        """Whether all ranks have raised, and have met in whatever collectives they have called."""
        settled = [c.settle() for c in self._channels if c.generation == place.generation]
        members = self._members(place)
        failing = all(r.failing is not None and r.status is Status.ALIVE for r in members)
        is_common = failing and all(settled) and not self._scheduler.is_condemned
        for rank in members if is_common else ():
            rank.make_error = None
        return is_common
