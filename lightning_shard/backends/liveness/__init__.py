"""The lifeline: a control connection beside the data, by which ranks know of each other's end.

                          rank 0
    rank 1 ─── lifeline ──> hub <── lifeline ─── rank 2        one thread in each process
       └──────── data ───────┴──────── data ───────┘           Gloo, NCCL, MPI

Transports notice a dead peer late, or not at all, and never say which rank it was. A connection
that ends without a goodbye is a death, one that is silent for long a stopped process; a rank that
raises says so. The first of these is the verdict, which interrupts what every rank waits for.
"""

import os
import socket
import sys
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing.util import Finalize

import torch.distributed as dist

from lightning_shard.backends._c10d import Store
from lightning_shard.backends.authentication.addresses import listen
from lightning_shard.backends.authentication.connection import Connection
from lightning_shard.backends.authentication.connection import connect as come_in
from lightning_shard.backends.authentication.token import JobAddress
from lightning_shard.backends.liveness.lifeline import Lifeline
from lightning_shard.backends.liveness.server import SERVICE
from lightning_shard.backends.liveness.thread import (
    LifelineThread,
    unwatch_signals_by,
    watch_signals_by,
)
from lightning_shard.errors import RankFailedError

_starts = count()
_thread: LifelineThread | None = None
_lifeline: Lifeline | None = None


def current() -> Lifeline | None:
    """Return this process's lifeline, or None: a single rank, or nothing started."""
    return _lifeline


def check(operation: str) -> None:
    """Return unless a rank is known to have failed, which this operation would wait for."""
    if _lifeline is not None:
        _lifeline.check(operation)


def start(
    store: Store,
    address: JobAddress,
    *,
    rank: int,
    world_size: int,
    timeout: timedelta,
    name: str | None = None,
) -> None:
    """Connect this process with all ranks; every rank must call. One rank alone needs nothing."""
    global _thread, _lifeline
    stop()
    if world_size == 1:
        return
    key = f"lightning_shard/lifeline/{next(_starts) if name is None else name}"
    _thread = connect(
        store,
        key,
        address,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        met_anew=name is not None,
    )
    _lifeline = _thread.lifeline
    _thread.start()
    # Not atexit, whose functions a process that `multiprocessing` has started does not run.
    Finalize(None, stop_at_exit, exitpriority=0)
    store.get(key)  # which may know of ranks that were lost before this lifeline was there
    _lifeline.await_all(timeout.total_seconds())


def stop() -> None:
    """Leave in order: the others do not miss this rank. Does nothing when nothing was started."""
    global _thread, _lifeline
    unwatch_signals()
    thread, _thread, _lifeline = _thread, None, None
    if thread is not None:
        thread.leave()


def stop_at_exit() -> None:
    """Leave as the process ends: in order, unless an uncaught exception ends it."""
    # A process that `multiprocessing` has started comes here while the exception passes.
    uncaught = sys.exception() or getattr(sys, "last_value", None)
    is_well = isinstance(uncaught, SystemExit) and not uncaught.code
    if _lifeline is not None and uncaught is not None and not is_well:
        _lifeline.announce_failure(uncaught)
    stop()


def connect(
    store: Store,
    key: str,
    address: JobAddress,
    *,
    rank: int,
    world_size: int,
    timeout: timedelta,
    met_anew: bool = False,
) -> LifelineThread:
    """Return a rank's thread, not yet started, with its connection to the hub."""
    seconds = timeout.total_seconds()
    try:
        hub: Connection | list[socket.socket]
        if rank == 0:
            hub = listen(address.host, 0)
            store.set(key, str(hub[0].getsockname()[1]))
        else:
            of_hub = replace(address, port=int(store.get(key)))
            hub = come_in(of_hub, SERVICE, seconds, between_tries=partial(store.get, key))
    except (OSError, ValueError, dist.DistError) as error:
        raise RankFailedError(
            f"Rank {rank} of {world_size} could not set up its control connection with rank 0 on "
            f"{address.host} within {timeout}. Check that rank 0 runs and that the hosts reach "
            f"each other's ports, as the ranks' data needs them too. The system said: {error}"
        ) from error
    return LifelineThread(
        rank=rank,
        world_size=world_size,
        timeout_seconds=seconds,
        token=address.token,
        hub=hub,
        met_anew=met_anew,
    )


def watch_signals() -> None:
    """Have the thread told of signals when the main thread is where no handler of Python's runs."""
    if _lifeline is not None:
        watch_signals_by(_lifeline.signal_fd)


def unwatch_signals() -> None:
    """Undo `watch_signals`."""
    if _lifeline is not None:
        unwatch_signals_by(_lifeline.signal_fd)


def _forget_in_child() -> None:
    """A forked child (a DataLoader's worker) is no rank, and must not keep the sockets open."""
    global _thread, _lifeline
    unwatch_signals()
    thread, _thread, _lifeline = _thread, None, None
    if thread is not None:
        thread.forget()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_in_child)
