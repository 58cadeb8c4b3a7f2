"""The lifeline: a control connection beside the data, by which ranks know of each other's end.

                   job's server of rank 0
    rank 1 ─── lifeline ──> hub <── lifeline ─── rank 2        one thread in each process
       └──────── data ───────┴──────── data ───────┘           Gloo, NCCL, MPI

Transports notice a dead peer late, or not at all, and never say which rank it was. A connection
that ends without a goodbye is a death, one that is silent for long a stopped process; a rank that
raises says so. The first of these is the verdict, which interrupts what every rank waits for.
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from multiprocessing.util import Finalize
from time import monotonic

import torch.distributed as dist

from lightning_shard.backends.authentication.connection import connect
from lightning_shard.backends.authentication.loop import Loop
from lightning_shard.backends.authentication.token import JobAddress
from lightning_shard.backends.liveness import job_server
from lightning_shard.backends.liveness.interruption import interrupt_groups
from lightning_shard.backends.liveness.lifeline import Lifeline
from lightning_shard.backends.liveness.server import SERVICE
from lightning_shard.backends.liveness.thread import (
    KeptConnection,
    unwatch_signals_by,
    watch_signals_by,
)
from lightning_shard.errors import RankFailedError

_starts = count()
_kept: "KeptLifeline | None" = None
_lifeline: Lifeline | None = None


def current() -> Lifeline | None:
    """Return this process's lifeline, or None: a single rank, or nothing started."""
    return _lifeline


def check(operation: str) -> None:
    """Return unless a rank is known to have failed, which this operation would wait for."""
    if _lifeline is not None:
        _lifeline.check(operation)


def start(
    address: JobAddress,
    *,
    rank: int,
    world_size: int,
    timeout: timedelta,
    look: Callable[[], object] | None = None,
) -> None:
    """Connect this process with all ranks; every rank must call. One rank alone needs nothing.

    Args:
        address: Where rank 0's server is.
        rank: The rank of this process.
        world_size: The number of ranks.
        timeout: How long the ranks wait for each other.
        look: Raises if a rank of those that meet anew, where a loss is no end, was lost before.
    """
    global _kept, _lifeline
    stop()
    if world_size == 1:
        return
    _kept = KeptLifeline(address, rank=rank, world_size=world_size, timeout=timeout, look=look)
    _lifeline = _kept.lifeline
    # Not atexit, whose functions a process that `multiprocessing` has started does not run.
    Finalize(None, stop_at_exit, exitpriority=0)
    if look is not None:
        look()  # it may know of ranks that were lost before this lifeline was there
    _lifeline.await_all(timeout.total_seconds())


def stop() -> None:
    """Leave in order: the others do not miss this rank. Does nothing when nothing was started."""
    global _kept, _lifeline
    unwatch_signals()
    kept, _kept, _lifeline = _kept, None, None
    if kept is not None:
        kept.leave()


def stop_at_exit() -> None:
    """Leave as the process ends: in order, unless an uncaught exception ends it."""
    # A process that `multiprocessing` has started comes here while the exception passes.
    uncaught = sys.exception() or getattr(sys, "last_value", None)
    is_well = isinstance(uncaught, SystemExit) and not uncaught.code
    if _lifeline is not None and uncaught is not None and not is_well:
        _lifeline.announce_failure(uncaught)
    stop()


class KeptLifeline:
    """A lifeline and the thread that keeps it: on rank 0 the job's server, whose hub it is.

    Raises:
        RankFailedError: The hub cannot be reached.
    """

    def __init__(
        self,
        address: JobAddress,
        *,
        rank: int,
        world_size: int,
        timeout: timedelta,
        look: Callable[[], object] | None = None,
    ) -> None:
        seconds, met_anew = timeout.total_seconds(), look is not None
        try:
            connection = connect(address, SERVICE, seconds, between_tries=look or (lambda: None))
        except (OSError, dist.DistError) as error:
            raise RankFailedError(
                f"Rank {rank} of {world_size} could not set up its control connection with rank 0 "
                f"on {address.host} within {timeout}. Check that rank 0 runs and that the hosts "
                "reach each other's ports, as the ranks' data needs them too. The system said: "
                f"{error}"
            ) from error
        self.kept = kept = KeptConnection(connection, seconds)
        self.lifeline = Lifeline(
            rank=rank,
            world_size=world_size,
            silence_seconds=kept.silence_seconds,
            send=kept.send,
            interrupt=interrupt_groups,
            now=monotonic(),
            met_anew=met_anew,
        )
        self._server = job_server.current() if rank == 0 else None
        self.thread = self._server or Loop("lightning-shard-lifeline")
        kept.keep(self.thread, self.lifeline)
        meeting = "anew" if met_anew else f"start {next(_starts)}"  # at a server of its own
        place = {"meeting": meeting, "rank": rank, "world_size": world_size}
        kept.send({"kind": "join", "silence_seconds": kept.silence_seconds, **place})
        self.lifeline.beat()
        if self._server is None:
            self.thread.start()

    def leave(self) -> None:
        """Say goodbye to the others and end the connection."""
        self.lifeline.leave()
        if self._server is None:
            self.thread.end()
        else:
            self.kept.leave()


def watch_signals() -> None:
    """Have the thread told of signals when the main thread is where no handler of Python's runs."""
    if _kept is not None:
        watch_signals_by(_kept.thread.signal_fd)


def unwatch_signals() -> None:
    """Undo `watch_signals`."""
    if _kept is not None:
        unwatch_signals_by(_kept.thread.signal_fd)


def _forget_in_child() -> None:
    """A forked child (a DataLoader's worker) is no rank."""
    global _kept, _lifeline
    unwatch_signals()
    _kept = _lifeline = None


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_in_child)
