"""The handle of an MPI operation."""

import os
import time
from datetime import timedelta
from typing import Any

from torch.futures import Future

from lightning_shard.backends.calls import Call
from lightning_shard.backends.group_handle import CallWork
from lightning_shard.backends.mpi.flight import Flight

# A wait spins, then yields the core, then sleeps: answers come in microseconds when the peers run
# on cores of their own, and leave the core to them when they do not.
_SPINS, _YIELDS = 50, 500
_SLEEP_SECONDS = 0.0001


class MPIWork(CallWork):
    """One rank's handle of one operation over MPI."""

    def __init__(self, flight: Flight, call: Call) -> None:
        super().__init__(call)
        self._flight = flight

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the results are there.

        Args:
            timeout: A time-out shorter than the group's; None, or c10d's zero, for the group's.

        Raises:
            RankFailedError: A peer has died, or has not come within the group's time-out.
            TimeoutError: The shorter `timeout` is over; the operation goes on.
        """
        end = time.monotonic() + timeout.total_seconds() if timeout else None
        polls = 0
        while not self._flight.poll():
            _pause(polls)
            polls += 1
            if polls > _YIELDS or polls % 100 == 0:
                self._flight.check()
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"{self._call} at {self._call.site} took longer than {timeout}.")
        if self._flight.error is not None:
            raise self._flight.error
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended, with its results or an error."""
        if not self._flight.poll():
            self._flight.check()
        return self._flight.done

    def is_success(self) -> bool:
        """Whether the results are there."""
        return self._flight.poll() and self._flight.error is None

    def exception(self) -> Exception | None:
        """Return the error of an operation that has failed, else None."""
        return self._flight.error

    def _source(self) -> int:
        return self._flight.source

    def get_future(self) -> Future[Any]:
        """Return a future that ends with the operation, on whatever thread sees it end."""
        devices: list[Any] = [
            t.device for t in self._call.outputs or self._call.inputs if t.is_cuda
        ]
        future: Future[Any] = Future(devices=devices[:1] or None)

        def end() -> None:
            if self._flight.error is None:
                future.set_result(list(self._call.results))
            else:
                future.set_exception(self._flight.error)

        self._flight.on_end(end)
        return future


def _pause(polls: int) -> None:
    if polls > _YIELDS:
        time.sleep(_SLEEP_SECONDS)
    elif polls > _SPINS:
        os.sched_yield()
