"""Ending what a process waits for in its process groups, from another thread.

When a rank is lost, the others may wait for each other in C++, where no exception reaches them: not
every group notices, and one that does may take its whole time-out.
"""

import contextlib
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from lightning_shard.backends._c10d import backends_of, live_backends

_TAG = (1 << 31) - 1  # of a message that nobody sends


@runtime_checkable
class Interruptible(Protocol):
    """A group of this package that can be told to give up waiting."""

    def interrupt(self) -> None:
        """Have every waiting operation raise; may be called from any thread."""


def interrupt_groups() -> None:
    """Have every operation that waits in any group of this process raise; they are unusable then.

    Works for Gloo, NCCL and the groups of this package with a method `interrupt`; the rest wait for
    their own time-out.
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
    """Close Gloo's connections: it does so whenever anybody's wait runs out.

    Neither `abort` nor `shutdown` of torch's Gloo wakes a waiting thread.
    """
    if backend.size() > 1:
        peer = (backend.rank() + 1) % backend.size()
        backend.recv([torch.zeros(1)], peer, _TAG).wait(timedelta(milliseconds=1))
