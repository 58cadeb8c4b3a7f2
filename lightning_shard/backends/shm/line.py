"""A group's operations, one after the other on a thread of its own.

An operation over two levels waits several times. Every rank of a group calls its operations in the
same order, and a line keeps it, so that two that are in flight never wait for each other.
"""

import atexit
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any
from weakref import ref

import torch
from torch.futures import Future

from lightning_shard.backends import liveness
from lightning_shard.backends.calls import Call
from lightning_shard.backends.group_handle import CallWork

_CHECK_SECONDS = 0.05
_LONGEST_END_SECONDS = 5.0


class LineWork(CallWork):
    """The handle of one operation in a line.

    Args:
        call: What this rank has called.
        description: The operation in words, for errors.
    """

    def __init__(self, call: Call, description: str) -> None:
        super().__init__(call)
        self._description = description
        self._has_ended = threading.Event()
        self._error: Exception | None = None
        self._future: Future[Any] = Future()

    def end(self, error: Exception | None) -> None:
        """Note that the operation has ended; called by the line."""
        self._error = error
        self._has_ended.set()
        if error is None:
            self._future.set_result(list(self._call.results))
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the results are there.

        Args:
            timeout: A time-out shorter than the group's; None, or c10d's zero, for the group's.

        Raises:
            RankFailedError: A peer has died.
            TimeoutError: The shorter `timeout` is over; the operation goes on.
        """
        until = time.monotonic() + timeout.total_seconds() if timeout else None
        while not self._has_ended.wait(_CHECK_SECONDS):
            lifeline = liveness.current()
            if lifeline is not None and lifeline.has_verdict:
                lifeline.check(self._description)
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"{self._description} took longer than {timeout}.")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended, with its results or an error."""
        return self._has_ended.is_set()

    def is_success(self) -> bool:
        """Whether the results are there."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return the error of an operation that has failed, else None."""
        return self._error

    def _source(self) -> int:
        return -1

    def get_future(self) -> Future[Any]:
        """Return a future that ends with the operation, on the line's thread."""
        return self._future


class Line:
    """Runs operations in the order in which they come.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._waiting: SimpleQueue[tuple[LineWork, Callable[[], None]] | None] = SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        atexit.register(_end, ref(self))  # a thread inside of torch must not outlive Python

    def put(self, work: LineWork, operation: Callable[[], None]) -> LineWork:
        """Run an operation once those before it have ended; after an error none is run any more."""
        self._waiting.put((work, operation))
        return work

    def end(self) -> None:
        """End the thread once it has nothing left to run; one that waits for a peer is left."""
        self._waiting.put(None)
        self._thread.join(_LONGEST_END_SECONDS)

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            work, operation = entry
            if self._failure is None:
                try:
                    with torch.inference_mode():
                        operation()
                except Exception as error:
                    self._failure = error
            work.end(self._failure)


def _end(line: "ref[Line]") -> None:
    alive = line()
    if alive is not None:
        alive.end()
