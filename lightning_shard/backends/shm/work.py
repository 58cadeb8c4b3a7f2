"""The handle of an operation over shared memory."""

import time
from datetime import timedelta
from typing import Any

from torch.futures import Future

from lightning_shard.backends.calls import Call
from lightning_shard.backends.group_handle import CallWork
from lightning_shard.backends.shm.doorbell import Doorbell
from lightning_shard.backends.shm.flight import Flight, flights


class ShmWork(CallWork):
    """One rank's handle of one operation.

    Args:
        flight: The operation in flight.
        call: What this rank has called.
        doorbell: By which peers wake this process.
    """

    def __init__(self, flight: Flight, call: Call, doorbell: Doorbell) -> None:
        super().__init__(call)
        self._flight, self._doorbell = flight, doorbell

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

    def is_success(self) -> bool:
        """Whether the results are there."""
        return self.is_completed() and self._flight.error is None

    def exception(self) -> Exception | None:
        """Return the error of an operation that has failed, else None."""
        return self._flight.error

    def _source(self) -> int:
        return self._flight.source

    def get_future(self) -> Future[Any]:
        """Return a future that ends with the operation, on whatever thread sees it end."""
        future: Future[Any] = Future()

        def end() -> None:
            if self._flight.error is None:
                future.set_result(list(self._call.results))
            else:
                future.set_exception(self._flight.error)

        self._flight.on_end(end)
        if not self._flight.done:
            flights.follow()
        return future
