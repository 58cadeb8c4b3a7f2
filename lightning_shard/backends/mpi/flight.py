"""An MPI operation in flight, and the thread that moves it on while its rank computes.

MPI makes progress when it is called. A waiting rank calls it all the time; otherwise a thread does
so every half a millisecond, as long as something is in flight, so that transfers go on beside the
computation and a peer never waits for a rank that is busy elsewhere.
"""

import threading
import time
from collections.abc import Generator
from typing import Any, Protocol

import torch
from typing_extensions import override

from lightning_shard.backends.in_flight import InFlight
from lightning_shard.backends.mpi.runtime import given_up, lock, mpi

_PERIOD_SECONDS = 0.0005


class Watch(Protocol):
    """Tells a flight whether its operation can still end, and what an error means."""

    def why_it_stops(self) -> Exception | None:
        """Return the error of an operation that can never end, else None."""

    def explain(self, error: Exception) -> Exception:
        """Return the error to raise in place of one that a step has raised."""


class Flight(InFlight):
    """The steps of one operation; each begins when the requests of the one before are complete.

    Args:
        steps: Generator that yields lists of MPI requests and does the arithmetic between them. It
            is sent the status of a single request.
        watch: Tells when the operation can never end, and what MPI's errors mean.
    """

    def __init__(self, steps: Generator[list[Any], Any, None], watch: Watch) -> None:
        super().__init__(lock)
        self._status: Any = None
        self._steps, self._watch = steps, watch
        self._requests: list[Any] = []
        with lock:
            self._next_step()

    def poll(self) -> bool:
        """Move on as far as possible without waiting; return whether it has ended."""
        with lock:
            try:
                while not self.done and self._are_complete():
                    self._next_step()
            except Exception as error:
                self._fail(self._watch.explain(error))
        if self.done:
            self.call_back()
        return self.done

    def check(self) -> None:
        """End the flight if it can never end by itself."""
        if not self.done and (error := self._watch.why_it_stops()) is not None:
            self._fail(error)
            self.call_back()

    def _fail(self, error: Exception) -> None:
        """End the flight with an error; its memory is kept, since MPI may still write to it."""
        with lock:
            if not self.done:
                self.error = error
                given_up.append(self)
                self.done = True

    @property
    @override
    def source(self) -> int:
        return -1 if not self.done or self._status is None else int(self._status.Get_source())

    def _are_complete(self) -> bool:
        if len(self._requests) == 1:
            self._status = mpi().Status()
            complete: bool = self._requests[0].Test(self._status)
            return complete
        return bool(mpi().Request.Testall(self._requests))

    def _next_step(self) -> None:
        with torch.inference_mode():
            try:
                self._requests = self._steps.send(self._status)
            except StopIteration:
                self.done = True


class ProgressThread:
    """Moves the flights of this process on while nobody waits for them."""

    def __init__(self) -> None:
        self._flights: list[Flight] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting = 0
        self._ended = False

    def add(self, flight: Flight) -> None:
        """Take over a flight that has not ended."""
        with self._changed:
            if self._ended:
                return
            self._flights.append(flight)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mpi-progress", daemon=True)
                self._thread.start()
            self._changed.notify()

    def end(self) -> None:
        """Stop the thread, before MPI ends."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._flights and not self._ended:
                    self._changed.wait()
                if self._ended:
                    return
                flights = list(self._flights)
            for flight in flights:
                if not flight.poll() and flight.is_followed:
                    flight.check()  # since nobody may be waiting who would
            ended = {id(flight) for flight in flights if flight.done}
            with self._changed:
                self._flights = [one for one in self._flights if id(one) not in ended]
            time.sleep(_PERIOD_SECONDS)


progress = ProgressThread()
