"""The process group of one rank over shared memory: its room, its mail, and when to give up.

Operations in flight go on when a rank of this process waits, calls, or has nothing to do. All of
a process's flights move together, in the order in which they began, so that two ranks may wait for
two operations in different order. A rank that waits spins, yields its core, and sleeps until a peer
rings. While it computes, a thread does so in its place.
"""

import os
import threading
import time
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.futures import Future
from typing_extensions import override

from lightning_shard.backends import liveness
from lightning_shard.backends._c10d import PrefixStore, Store
from lightning_shard.backends.calls import Call
from lightning_shard.backends.in_flight import FlightWork, InFlight, OperationWatch
from lightning_shard.backends.python_group import PythonGroup
from lightning_shard.backends.shm.doorbell import Doorbell
from lightning_shard.backends.shm.heap import own_heap
from lightning_shard.backends.shm.mail import Mail
from lightning_shard.backends.shm.operations import OPERATIONS, BoardWait, Steps
from lightning_shard.backends.shm.room import Room
from lightning_shard.errors import RankFailedError

_SPINS, _YIELDS = 20, 200
_SLEEP_SECONDS = 0.02
_UNWATCHED_SLEEP_SECONDS = 0.005
BACKEND_NAME = "shm"
_left_rooms: list[Room] = []  # at whose boards peers may still look


class ShmFlight(InFlight):
    """The steps of one operation.

    Args:
        steps: Generator that yields what it waits for.
        watch: Tells when the operation can never end.
    """

    def __init__(self, steps: Steps, watch: "_ShmOperationWatch") -> None:
        super().__init__(flights.lock)
        self._source = -1
        self._steps, self._watch = steps, watch
        self._wait: BoardWait | None = None

    @property
    @override
    def source(self) -> int:
        return self._source

    def poll(self) -> None:
        """Go on as far as possible without waiting; under the lock of `flights`."""
        try:
            while not self.done and (self._wait is None or self._wait.is_over()):
                with torch.inference_mode():
                    self._wait = next(self._steps)
        except StopIteration as end:
            self._source = -1 if end.value is None else end.value
            self.done = True
        except Exception as error:
            self.fail(error)

    def check(self) -> None:
        """End the flight if it can never end by itself."""
        if not self.done and self._wait is not None:
            error = self._watch.why_it_stops(self._wait)
            if error is not None:
                self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the flight with an error; its generator is kept, since peers may read its memory."""
        if not self.done:
            self.error, self.done = error, True
            self._watch.broke(error)


class Flights:
    """All flights of this process that have not ended.

    Attributes:
        lock: Guards them, and the boards of this process.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._flights: list[ShmFlight] = []
        self._waiting = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, flight: ShmFlight) -> None:
        """Start a flight."""
        with self.lock:
            self._flights.append(flight)
            self._poll_locked()
        self._call_back(flight)
        if not flight.done and not self._waiting:
            self._wake_thread()

    def poll(self) -> None:
        """Let every flight go on as far as it can."""
        with self.lock:
            ended = self._poll_locked()
        for flight in ended:
            self._call_back(flight)

    def wait(self, flight: ShmFlight, doorbell: Doorbell, until: float | None) -> bool:
        """Return once a flight has ended, or at a time of `time.monotonic`; whether it has."""
        polls = 0
        self._waiting += 1
        try:
            while not flight.done:
                self.poll()
                if flight.done:
                    break
                polls += 1
                if polls > _YIELDS:
                    self._sleep(flight, doorbell, _SLEEP_SECONDS)
                    flight.check()
                elif polls > _SPINS:
                    os.sched_yield()
                if until is not None and time.monotonic() > until:
                    return flight.done
        finally:
            self._waiting -= 1
            if self._flights and not self._waiting:
                self._wake_thread()
        self._call_back(flight)
        return True

    def _sleep(self, flight: ShmFlight | None, doorbell: Doorbell, seconds: float) -> None:
        word = doorbell.listen()
        try:
            self.poll()
            if flight is None or not flight.done:
                doorbell.sleep(word, seconds)
        finally:
            doorbell.end_sleep()

    def _poll_locked(self) -> list[ShmFlight]:
        for flight in self._flights:
            flight.poll()
        ended = [flight for flight in self._flights if flight.done]
        if ended:
            self._flights = [flight for flight in self._flights if not flight.done]
        return ended

    def _call_back(self, flight: ShmFlight) -> None:
        if flight.done and flight.is_followed:
            flight.call_back()

    # --- while nobody waits -----------------------------------------------------------------------

    def follow(self) -> None:
        """Let the thread look after flights whose end a callback waits for."""
        self._wake_thread()

    def _wake_thread(self) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="shm-progress", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        from lightning_shard.backends.shm.heap import own_heap

        doorbell = own_heap().doorbell
        while True:
            with self._changed:
                while self._waiting or not self._flights:
                    self._changed.wait()
            self._sleep(None, doorbell, _UNWATCHED_SLEEP_SECONDS)
            for flight in list(self._flights):
                if flight.is_followed:
                    flight.check()  # since nobody may be waiting who would
                    self._call_back(flight)

    def forget(self) -> None:
        """Drop everything in a forked child, which is no rank."""
        self.__init__()  # type: ignore[misc]


flights = Flights()

if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=flights.forget)


class ShmWork(FlightWork):
    """One rank's handle of one operation.

    Args:
        flight: The operation in flight.
        call: What this rank has called.
        doorbell: By which peers wake this process.
    """

    _flight: ShmFlight

    def __init__(self, flight: ShmFlight, call: Call, doorbell: Doorbell) -> None:
        super().__init__(flight, call)
        self._doorbell = doorbell

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the results are there.

        Args:
            timeout: A time-out shorter than the group's; None, or c10d's zero, for the group's.

        Raises:
            RankFailedError: A peer has died, or has not come within the group's time-out.
            CollectiveMismatchError: The ranks called different operations.
            TimeoutError: The shorter `timeout` is over; the operation goes on.
        """
        until = time.monotonic() + timeout.total_seconds() if timeout else None
        if not flights.wait(self._flight, self._doorbell, until):
            raise TimeoutError(f"{self._call} at {self._call.site} took longer than {timeout}.")
        if self._flight.error is not None:
            raise self._flight.error
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended, with its results or an error."""
        if not self._flight.done:
            flights.poll()
            self._flight.check()
        return self._flight.done

    @override
    def get_future(self) -> Future[Any]:
        future = super().get_future()
        if not self._flight.done:
            flights.follow()
        return future


class ShmGroup(PythonGroup):
    """One rank's handle of one group.

    Args:
        name: Name of the group in c10d, the same on each of its ranks.
        global_ranks: Global ranks of the group's members, in order of their group rank.
        rank: This rank's number in the group.
        timeout: Time after which a peer that has not come is an error.
        store: The group's own store, at which its ranks meet to make the group.

    Raises:
        ConfigError: A process is another user's, or cannot be seen from here.
        RankFailedError: A rank has ended.
        BackendUnavailableError: The host has no memory for the group's board.

    Attributes:
        failure: The first error of an operation, after which the ranks are out of step.
        is_interrupted: Whether a rank is known to have failed, so that nobody waits any more.
    """

    backend_name: ClassVar[str] = BACKEND_NAME
    shares_host = True

    def __init__(
        self,
        name: str,
        global_ranks: tuple[int, ...],
        rank: int,
        timeout: timedelta,
        store: Store,
    ) -> None:
        super().__init__(name, global_ranks, rank, timeout)
        self.failure: Exception | None = None
        self.is_interrupted = False
        corner = PrefixStore(f"shm/{store.add(f'shm/made/{rank}', 1)}", store)
        _left_rooms[:] = [room for room in _left_rooms if not room.all_have_left]
        self._room = Room(own_heap(), corner, rank, len(global_ranks))
        self._mail = Mail(self._room)

    @override
    def _start(self, call: Call) -> ShmWork:
        watch = _ShmOperationWatch(self, call)
        if (failure := self.failure or watch.peer_failure()) is not None:
            raise failure
        flight = ShmFlight(OPERATIONS[call.op](self._room, self._mail, call), watch)
        flights.begin(flight)
        return ShmWork(flight, call, self._room.heap.doorbell)

    @property
    def timeout(self) -> timedelta:
        """Time after which a peer that has not come is an error."""
        return self._timeout

    def break_off(self, error: Exception) -> None:
        """Take note of an operation's error: later ones raise it, too."""
        self.failure = self.failure or error

    def absent(self, ranks: list[int]) -> list[int]:
        """Return the global ranks among group ranks that have left, or whose processes ended."""
        boards = self._room.boards
        gone = [rank for rank in ranks if boards[rank].has_left or boards[rank].heap.has_ended]
        return [self.global_ranks[rank] for rank in gone]

    def interrupt(self) -> None:
        """Have every waiting operation raise; may be called from any thread."""
        self.is_interrupted = True
        self._room.heap.doorbell.ring()

    @override
    def shutdown(self) -> None:
        self._room.leave()
        if self._room not in _left_rooms:
            _left_rooms.append(self._room)


class _ShmOperationWatch(OperationWatch):
    """Watches one operation of this rank for the flight, and makes its errors.

    Args:
        group: The group whose operation it is.
        call: This rank's call.
    """

    _group: ShmGroup

    def __init__(self, group: ShmGroup, call: Call) -> None:
        super().__init__(group, call, call.site)
        self._begin = time.monotonic()

    def broke(self, error: Exception) -> None:
        """Have the group's later operations raise the same error."""
        self._group.break_off(error)

    def why_it_stops(self, wait: BoardWait) -> Exception | None:
        """Return the error when a rank has failed or left, or the time-out is over; else None."""
        group, lifeline = self._group, liveness.current()
        failure = group.failure or self.peer_failure()
        if failure is not None:
            return failure
        gone = group.absent(wait.absent())
        if gone and not wait.is_over():
            if lifeline is not None:
                explained = lifeline.explain(str(self))
                if lifeline.has_verdict:
                    return explained
            return RankFailedError(
                f"{self.place} can never go on with {self}: rank {', '.join(map(str, gone))} has "
                "ended without it. Look for a rank that returned early, called sys.exit or was "
                "killed."
            )
        if group.is_interrupted and lifeline is not None:
            return lifeline.explain(str(self))
        if time.monotonic() < self._begin + group.timeout.total_seconds():
            return None
        if lifeline is not None:
            return lifeline.explain(str(self))
        late = ", ".join(str(group.global_ranks[rank]) for rank in wait.absent())
        return RankFailedError(
            f"{self.place} has waited for the group's time-out in {self}, and rank "
            f"{late or 'unknown'} has not come. Look for the first error among the other ranks' "
            "output."
        )
