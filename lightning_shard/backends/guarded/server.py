"""The job's server: a thread of rank 0 that keeps the store behind a door."""

import os
import socket
import threading
from collections.abc import Sequence
from selectors import DefaultSelector
from time import monotonic

from lightning_shard.backends.guarded.door import Door
from lightning_shard.backends.guarded.key_values import KeyValueService

_TICK_SECONDS = 1.0
_UNSENT_SECONDS = 0.01
_SERVICE = "store"  # `store.SERVICE`, whose module imports torch


class JobServer(threading.Thread):
    """Serves a job's keys and values until the process ends.

    Args:
        listeners: The sockets to which ranks connect.
        token: The job's token.
    """

    def __init__(self, listeners: Sequence[socket.socket], token: str) -> None:
        super().__init__(name="lightning-shard-job", daemon=True)
        self.port = int(listeners[0].getsockname()[1])
        self._selector = DefaultSelector()
        self._service = KeyValueService(self._selector)
        self._door = Door(listeners, token, self._selector, {_SERVICE: self._service.admit})
        self._ends = False
        self._process = os.getpid()

    def run(self) -> None:
        """Serve until `end`."""
        last_tick = monotonic()
        while not self._ends:
            seconds = _UNSENT_SECONDS if self._service.has_unsent else _TICK_SECONDS
            for key, _ in self._selector.select(seconds):
                key.data()
            self._service.flush()
            if (now := monotonic()) - last_tick >= _TICK_SECONDS:
                self._door.tick(now)
                last_tick = now
        self._selector.close()
        self.forget()

    def end(self) -> None:
        """Close the door and every connection."""
        self._ends = True
        self.join()

    def forget(self) -> None:
        """Close the sockets; in a forked child those of the parent."""
        self._door.close()
        self._service.close()
