"""An MPI operation in flight, and the thread that moves it on while its rank computes.

MPI makes progress when it is called. A waiting rank calls it all the time; otherwise a thread does
so every half a millisecond, as long as something is in flight, so that transfers go on beside the
computation and a peer never waits for a rank that is busy elsewhere.
"""

import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

import torch

from lightning_shard.backends.mpi.runtime import lock, mpi

_PERIOD_SECONDS = 0.0005


class Watch(Protocol):
    """Knows what an operation is part of."""

    def why_it_stops(self) -> Exception | None:
        """Return why the operation can never end, if so."""

    def explain(self, error: Exception) -> Exception:
        """Return the error to raise for one that a step has raised."""


class Flight:
    """The steps of one operation; each begins when the requests of the one before are complete.

    Args:
        steps: Yields lists of MPI requests; does the arithmetic between them.
        watch: Knows when the operation can never end, and what MPI's errors mean.
    """

    def __init__(self, steps: Generator[list[Any], None, None], watch: Watch) -> None:
        self.done = False
        self.error: Exception | None = None
        self.source = -1
        self._steps, self._watch = steps, watch
        self._requests: list[Any] = []
        self._on_end: list[Callable[[], None]] = []
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
        return self.done

    def check(self) -> None:
        """End the flight if it can never end by itself."""
        if not self.done and (error := self._watch.why_it_stops()) is not None:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End the flight with an error; its memory is kept, since MPI may still write to it."""
        with lock:
            if not self.done:
                self.error = error
                _abandoned.append(self)
                self._end()

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the flight has ended, or now if it has."""
        with lock:
            if not self.done:
                self._on_end.append(callback)
                return
        callback()

    def _are_complete(self) -> bool:
        if len(self._requests) == 1:
            status = mpi().Status()
            complete: bool = self._requests[0].Test(status)
            self.source = status.Get_source() if complete else -1
            return complete
        return bool(mpi().Request.Testall(self._requests))

    def _next_step(self) -> None:
        with torch.inference_mode():
            try:
                self._requests = next(self._steps)
            except StopIteration:
                self._end()

    def _end(self) -> None:
        self.done = True
        callbacks, self._on_end = self._on_end, []
        for callback in callbacks:
            callback()


_abandoned: list[Flight] = []


class Progress:
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
            ended = {id(flight) for flight in flights if flight.poll()}
            with self._changed:
                self._flights = [one for one in self._flights if id(one) not in ended]
            time.sleep(_PERIOD_SECONDS)


progress = Progress()
