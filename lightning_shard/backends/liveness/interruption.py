"""Ending what a process waits for in its process groups, from another thread.

When a rank is lost, the others may wait in C++, where no exception reaches them. A thread that
waits there must have come back before Python ends, else the process aborts as it is unwound.
"""

import atexit
import contextlib
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from time import monotonic
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lightning_shard.backends._c10d import backends_of, live_backends

_TAG = (1 << 31) - 1  # of a message that nobody sends
_END_SECONDS = 5.0  # before what a thread waits for is interrupted, and after that

_threads: WeakKeyDictionary[Thread, Callable[[], object]] = WeakKeyDictionary()


@runtime_checkable
class Interruptible(Protocol):
    """A group of this package that can be told to give up waiting."""

    def interrupt(self) -> None:
        """Have every waiting operation raise; may be called from any thread."""


def interrupt_groups() -> None:
    """Have every operation that waits in any group of this process raise; they are unusable then.

    A group that is not Gloo's or NCCL's and has no `interrupt` waits for its own time-out.
    """
    _interrupt_each(live_backends())


def interrupt_group(group: dist.ProcessGroup) -> None:
    """Have every operation that waits in this group raise; it is unusable then."""
    _interrupt_each(backends_of(group))


def _interrupt_each(backends: list[Any]) -> None:
    for backend in backends:
        # A group that has just failed, or is being destroyed, needs no interruption.
        with contextlib.suppress(Exception):
            interrupt_backend(backend)


def interrupt_backend(backend: Any) -> None:
    """Have every operation that waits in this one raise, if its kind can be interrupted."""
    if isinstance(backend, Interruptible):
        backend.interrupt()
    elif dist.is_gloo_available() and isinstance(backend, dist.ProcessGroupGloo):
        _interrupt_gloo(backend)
    elif dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL):
        backend.abort()


def _interrupt_gloo(backend: Any) -> None:
    """Close Gloo's connections: it does so whenever anybody's wait runs out."""
    # Neither `abort` nor `shutdown` wakes a waiting thread; a wait for a dead neighbour is refused.
    if backend.size() > 1:
        backend.recv_anysource([torch.zeros(1)], _TAG).wait(timedelta(milliseconds=1))


def end_at_exit(thread: Thread, ask: Callable[[], object] = lambda: None) -> None:
    """Have a thread that may be inside of torch end before Python does; `ask` asks it to end."""
    _threads[thread] = ask


@atexit.register
def _end_threads() -> None:
    """Wait for the threads, and interrupt what those wait for that do not come."""
    left = {one: ask for one, ask in _threads.items() if one.is_alive()}
    for ask in left.values():
        ask()
    for is_patient in (True, False):
        if not is_patient and any(one.is_alive() for one in left):
            interrupt_groups()
        deadline = monotonic() + _END_SECONDS
        for one in left:
            one.join(max(0.0, deadline - monotonic()))
