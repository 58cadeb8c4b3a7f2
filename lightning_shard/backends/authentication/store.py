"""The job's store, as each rank sees it: c10d's `Store` behind the job's door.

Each call takes a connection that no other thread uses, so that one which waits keeps nobody.
"""

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, cast

import torch.distributed as dist
from typing_extensions import override

from lightning_shard.backends._c10d import Store
from lightning_shard.backends.authentication.connection import (
    Connection,
    WrongTokenError,
    ask,
    connect,
)
from lightning_shard.backends.authentication.key_values import RequestStore
from lightning_shard.backends.authentication.token import JobAddress, wrong_token

SERVICE = "store"
_ANSWER_SECONDS = 60.0
_LONGEST_LISTED = 200

# C++ holds a store by its C++ part alone, whose methods are gone with the Python object.
_stores: "dict[JobAddress, JobStore]" = {}


def store_at(address: JobAddress, timeout: timedelta) -> Store:
    """Return this process's store of a job; the time-out is for connecting, `get` and `wait`."""
    made = _stores.get(address)
    if made is None:
        made = _stores[address] = JobStore(address, timeout)
    store = cast(Store, made)
    store.set_timeout(timeout)
    return store


class JobStore(RequestStore):
    """The store of one job."""

    def __init__(self, address: JobAddress, timeout: timedelta) -> None:
        super().__init__()
        self.address = address
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        store: Any = self
        store.set_timeout(timeout)
        first = self._connect(timeout)
        self.own_address = first.own_address
        self._idle.append(first)

    def clone(self) -> "JobStore":
        """Return this store: its calls wait for each other nowhere."""
        return self

    def forget(self) -> None:
        """Let go of the sockets in a forked child, so that they end when the parent does."""
        self._lock = threading.Lock()
        while self._idle:
            self._idle.pop().close()

    @override
    def _get(self, keys: Sequence[str], timeout: timedelta | None) -> list[str]:
        store: Any = self
        seconds = (timeout or store.timeout).total_seconds()
        try:
            answer: list[str] = self._ask("get", seconds, keys=list(keys))
        except TimeoutError:
            told = ", ".join(keys)[:_LONGEST_LISTED]
            raise dist.DistStoreError(
                f"wait timeout after {1000 * seconds:.0f}ms, keys: {told}"
            ) from None
        return answer

    @override
    def _ask(self, kind: str, seconds: float = _ANSWER_SECONDS, **told: Any) -> Any:
        connection = self._take()
        try:
            answer = ask(connection, {"kind": kind, **told}, seconds)["answer"]
        except TimeoutError:
            connection.close()  # what it has asked for is of no use any more
            if kind == "get":
                raise
            raise dist.DistNetworkError(f"{self} timed out after {seconds:.0f} s") from None
        except OSError as error:
            connection.close()
            raise dist.DistNetworkError(f"{self}: connection closed by peer ({error})") from None
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)
        return answer

    def _take(self) -> Connection:
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                connection.receive()
                if connection.is_open:
                    return connection
                connection.close()  # of a server that has gone; another may have its place
        store: Any = self
        return self._connect(store.timeout)

    def _connect(self, timeout: timedelta) -> Connection:
        begin, address = monotonic(), self.address
        try:
            return connect(address, SERVICE, timeout.total_seconds())
        except WrongTokenError as error:
            raise wrong_token(address, error) from error
        except OSError as error:
            raise dist.DistNetworkError(
                f"{self}: timed out after {monotonic() - begin:.1f} s, not connected ({error})"
            ) from error

    def __repr__(self) -> str:
        """Say where it is, and nothing secret."""
        return f"the job's store at {self.address.host}, port {self.address.port}"


def _forget_in_child() -> None:
    """A forked child (a DataLoader's worker) is no rank, and must not keep the sockets open."""
    for store in list(_stores.values()):
        store.forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_in_child)
