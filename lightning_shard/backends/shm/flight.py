"""Operations in flight: they go on when a rank of this process waits, calls, or has nothing to do.

All of a process's flights move together, in the order in which they began, so that two ranks may
wait for two operations in different order. A rank that waits spins, yields its core, and sleeps
until a peer rings. While it computes, a thread does so in its place.
"""

import os
import threading
import time
from typing import Protocol

import torch
from typing_extensions import override

from lightning_shard.backends.in_flight import InFlight
from lightning_shard.backends.shm.doorbell import Doorbell
from lightning_shard.backends.shm.operations import Steps, Wait

_SPINS, _YIELDS = 20, 200
_SLEEP_SECONDS = 0.02
_UNWATCHED_SLEEP_SECONDS = 0.005


class Watch(Protocol):
    """Tells a flight whether it can still end."""

    def why_it_stops(self, wait: Wait) -> Exception | None:
        """Return the error of an operation that can never go on, else None."""

    def broke(self, error: Exception) -> None:
        """Take note that an operation has failed, after which the ranks are out of step."""


class Flight(InFlight):
    """The steps of one operation.

    Args:
        steps: Generator that yields what it waits for.
        watch: Tells when the operation can never end.
    """

    def __init__(self, steps: Steps, watch: Watch) -> None:
        super().__init__(flights.lock)
        self._source = -1
        self._steps, self._watch = steps, watch
        self._wait: Wait | None = None

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
        self._flights: list[Flight] = []
        self._waiting = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, flight: Flight) -> None:
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

    def wait(self, flight: Flight, doorbell: Doorbell, until: float | None) -> bool:
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

    def _sleep(self, flight: Flight | None, doorbell: Doorbell, seconds: float) -> None:
        word = doorbell.listen()
        try:
            self.poll()
            if flight is None or not flight.done:
                doorbell.sleep(word, seconds)
        finally:
            doorbell.end_sleep()

    def _poll_locked(self) -> list[Flight]:
        for flight in self._flights:
            flight.poll()
        ended = [flight for flight in self._flights if flight.done]
        if ended:
            self._flights = [flight for flight in self._flights if not flight.done]
        return ended

    def _call_back(self, flight: Flight) -> None:
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
