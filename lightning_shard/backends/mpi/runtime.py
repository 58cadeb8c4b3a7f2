"""MPI itself: imported on first use, called by one thread at a time, and ended in order.

MPI_Finalize waits for every rank, so a rank that ends because of an error must not call it. At exit
each rank says goodbye to all others, and how far it had come, and finalizes only when all have:

    rank 1 ends ──"of group '0' I have begun 12 collectives"──> rank 0, in the 13th: it never comes

Having left is no reason to give a rank up: others may still get what it sent.
"""

import atexit
import ctypes
import importlib
import json
import math
import os
import secrets
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_shard.backends import liveness
from lightning_shard.core import settings
from lightning_shard.core.extras import installing, missing
from lightning_shard.errors import BackendUnavailableError

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Intracomm, Request

MADE, COLLECTIVE = "made", "collective"
Tally = Counter[str]
"""Counts what a rank has begun in one group: `{"made": 1, "collective": 12, "send 3": 2}`."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """The part of other ranks without which one operation can never end.

    The counts under the keys `parts` in the tallies of its global ranks must add up to `number`.
    """

    group: str
    ranks: Sequence[int]
    parts: Sequence[str]
    number: int


class Departures:
    """The tallies of this rank, which it sends when it leaves, and those that others have sent."""

    def __init__(self) -> None:
        self._own: dict[str, Tally] = {}
        self._left: dict[int, dict[str, Tally]] = {}

    @property
    def num_left(self) -> int:
        """Number of other ranks that have left."""
        return len(self._left)

    def tally(self, group: str) -> Tally:
        """Return this rank's own tally of a group, which the caller counts up."""
        return self._own.setdefault(group, Counter())

    def say_goodbye(self, world: "Intracomm", tag: int) -> "list[Request]":
        """Tell every other rank how far this one has come."""
        others = (rank for rank in range(world.size) if rank != world.rank)
        return [world.isend((world.rank, self._own), rank, tag) for rank in others]

    def listen(self, world: "Intracomm", tag: int) -> None:
        """Take every goodbye that has come."""
        while (message := world.improbe(tag=tag)) is not None:
            rank, tallies = message.recv()
            self._left[rank] = tallies

    def who_never_comes(self, need: Need) -> int | None:
        """Return a rank that has left before its part in an operation, if there is one."""
        for rank in need.ranks:
            if rank in self._left:
                tally = self._left[rank].get(need.group, Tally())
                if sum(tally[part] for part in need.parts) < need.number:
                    return rank
        return None


T = TypeVar("T")
lock = threading.RLock()  # around every call of MPI: less than MPI_THREAD_MULTIPLE will do
departures = Departures()
given_up: list[object] = []  # operations that never ended: MPI may still write to their memory
_before_end: list[Callable[[], None]] = []

_LEAVING_POLL_SECONDS = 0.001
_PATIENCE_SECONDS = 30.0


def unavailable_reason() -> str | None:
    """Say why MPI cannot be used here and what to install, or None when it can."""
    try:
        importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError, OSError) as error:
        return missing("mpi4py") or (
            f"mpi4py found no MPI library it can load ({error}). Install both with: "
            f"{installing('mpi4py')}"
        )
    return None


@cache
def mpi() -> Any:
    """Return the module `mpi4py.MPI`; the first import calls MPI_Init."""
    if (reason := unavailable_reason()) is not None:
        raise BackendUnavailableError(f"The backend 'mpi' cannot run here: {reason}")
    module: Any = importlib.import_module("mpi4py.MPI")
    if module.Query_thread() < module.THREAD_SERIALIZED:
        raise BackendUnavailableError(
            "The backend 'mpi' needs MPI_THREAD_SERIALIZED, but MPI was started with less. Leave "
            "mpi4py.rc.thread_level at its default, or use an MPI library built with threads."
        )
    return module


def host_of_rank_zero() -> str:
    """Return rank 0's address, loopback when all share its host; collective over COMM_WORLD."""
    module = mpi()
    with lock:
        world = module.COMM_WORLD
        on_this_host = world.Split_type(module.COMM_TYPE_SHARED)
        shared = bool(on_this_host.size == world.size)
        on_this_host.Free()
        return "127.0.0.1" if shared else from_rank_zero(str(module.Get_processor_name()))


def job_token() -> str:
    """Return the given job token, or one that rank 0 draws; collective over COMM_WORLD."""
    given = settings.job_token()
    return from_rank_zero(given or secrets.token_hex(16))


def from_rank_zero(value: T) -> T:
    """Return rank 0's `value`, which JSON can hold; every rank of COMM_WORLD must call."""
    with lock:
        world = mpi().COMM_WORLD
        told = bytearray(json.dumps(value).encode() if world.rank == 0 else b"")
        size = array("q", [len(told)])
        world.Bcast(size)
        text = told if world.rank == 0 else bytearray(size[0])
        world.Bcast(text)
    received: T = json.loads(text)
    return received


def communicator(global_ranks: tuple[int, ...], tag: int) -> "Intracomm":
    """Make a communicator of these ranks of COMM_WORLD, in this order; each of them must call."""
    module = mpi()
    with lock:
        members = module.COMM_WORLD.group.Incl(global_ranks)
        made: Intracomm = module.COMM_WORLD.Create_group(members, tag)
        made.Set_errhandler(module.ERRORS_RETURN)
        members.Free()
    return made


def free(comm: "Comm") -> None:
    """Give a communicator back, unless MPI has ended."""
    with lock:
        if not mpi().Is_finalized():
            comm.Free()


@cache
def largest_tag() -> int:
    """Return the largest tag that this MPI library allows."""
    module = mpi()
    return int(module.COMM_WORLD.Get_attr(module.TAG_UB))


def is_cuda_aware() -> bool:
    """Say whether MPI takes pointers to GPU memory, as far as Open MPI tells."""
    try:
        return bool(ctypes.CDLL(mpi().__file__).MPIX_Query_cuda_support())
    except (AttributeError, OSError):
        return False


def who_never_comes(need: Need) -> int | None:
    """Return a rank that has left before its part in an operation, if there is one."""
    with lock:
        departures.listen(mpi().COMM_WORLD, largest_tag())
    return departures.who_never_comes(need)


def finalize_in_order(before: Callable[[], None]) -> None:
    """Have MPI end at exit: on all ranks together, or not at all when one has failed."""
    if not _before_end:
        atexit.register(_finalize)
    if before not in _before_end:
        _before_end.append(before)


def _finalize() -> None:
    module = mpi()
    if module.Is_finalized():
        return
    # An exception that ends the interpreter has been printed by now.
    has_failed = getattr(sys, "last_value", None) is not None
    if module.COMM_WORLD.size > 1 and (has_failed or not _all_leave()):
        liveness.stop_at_exit()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    for call in _before_end:
        call()
    module.Finalize()


def _all_leave() -> bool:
    """Say goodbye, and wait until every rank has; return False when one has failed, it seems."""
    module, tag = mpi(), largest_tag()
    world, lifeline = module.COMM_WORLD, liveness.current()
    # A rank that may have lost a peer does not wait for ever: mpirun may have been told to go on.
    end = time.monotonic() + (_PATIENCE_SECONDS if given_up else math.inf)
    try:
        with lock:
            goodbyes = departures.say_goodbye(world, tag)
        while time.monotonic() < end and not (lifeline and lifeline.has_verdict):
            with lock:
                departures.listen(world, tag)
                if departures.num_left == world.size - 1 and module.Request.Testall(goodbyes):
                    return True
            time.sleep(_LEAVING_POLL_SECONDS)
    except module.Exception:  # who has gone cannot be told goodbye
        pass
    return False
