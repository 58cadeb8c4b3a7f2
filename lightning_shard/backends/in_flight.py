"""An operation in flight on a backend written in Python: who hears of its end, and its handle."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.futures import Future

from lightning_shard.backends import liveness
from lightning_shard.backends.call_site import CallSite
from lightning_shard.backends.calls import Call
from lightning_shard.backends.group_handle import CallWork, GroupHandle
from lightning_shard.errors import RankFailedError


class InFlight(ABC):
    """One operation in flight; a backend says how it goes on.

    Args:
        lock: Guards who hears of the end.

    Attributes:
        done: Whether it has ended, with its results or an error.
        error: The error with which it has ended.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self.done = False
        self.error: Exception | None = None
        self._lock = lock
        self._on_end: list[Callable[[], None]] = []

    @property
    @abstractmethod
    def source(self) -> int:
        """The group rank that sent what a receive got; -1 before it came."""

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the flight has ended, or now if it has."""
        with self._lock:
            self._on_end.append(callback)
        if self.done:
            self.call_back()

    @property
    def is_followed(self) -> bool:
        """Whether a callback waits for the end of the flight."""
        return bool(self._on_end)

    def call_back(self) -> None:
        """Call the callbacks, which are the user's code, outside the lock and inference mode."""
        with self._lock:
            callbacks, self._on_end = self._on_end, []
        for callback in callbacks:
            callback()


class FlightWork(CallWork):
    """One rank's handle of an operation in flight.

    Args:
        flight: The operation in flight.
        call: What this rank has called.
    """

    def __init__(self, flight: InFlight, call: Call) -> None:
        super().__init__(call)
        self._flight = flight

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


class OperationWatch:
    """Watches one operation of this rank for its flight; a backend says when it can never end.

    Args:
        group: The group whose operation it is.
        operation: This rank's call, or the operation's name.
        site: File and line where the user called.
    """

    def __init__(self, group: GroupHandle, operation: Call | str, site: CallSite) -> None:
        self._group, self._operation, self._site = group, operation, site

    def __str__(self) -> str:
        return f"{self._operation} of {self._group.group_desc} at {self._site}"

    @property
    def place(self) -> str:
        """This rank in words."""
        return f"Rank {self._group.global_ranks[self._group.rank()]}"

    def peer_failure(self) -> RankFailedError | None:
        """Return the error of a rank that is known to have failed."""
        lifeline = liveness.current()
        try:
            if lifeline is not None and lifeline.has_verdict:
                lifeline.check(str(self._operation))
        except RankFailedError as error:
            return error
        return None
