"""MPI itself: imported on first use, called by one thread at a time, and ended in order.

MPI_Finalize waits for every rank. A rank that ends because of an error must not call it: its peers
never come, and what was an error message becomes a hang. So at exit the ranks meet in a barrier
that can be given up, and only when all have come does each finalize.
"""

import atexit
import ctypes
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_shard.errors import BackendUnavailableError

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Intracomm

T = TypeVar("T")
LEAVE_SECONDS = 30.0
lock = threading.RLock()  # around every call of MPI: less than MPI_THREAD_MULTIPLE will do

_HOW_TO_INSTALL = "Install both with: pip install 'lightning-shard[mpi]'."


def unavailable_reason() -> str | None:
    """Say why MPI cannot be used here and what to install, or None when it can."""
    try:
        importlib.import_module("mpi4py.MPI")
    except ModuleNotFoundError:
        return f"mpi4py is not installed; it and an MPI library are needed. {_HOW_TO_INSTALL}"
    except (ImportError, RuntimeError, OSError) as error:
        return f"mpi4py found no MPI library it can load ({error}). {_HOW_TO_INSTALL}"
    return None


@cache
def mpi() -> Any:
    """Return the module `mpi4py.MPI`; the first import calls MPI_Init.

    Raises:
        BackendUnavailableError: It or the MPI library is missing, or MPI has no threads.
    """
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
    """Return an address of rank 0 for the other ranks; loopback when all share its host.

    Collective over COMM_WORLD.
    """
    module = mpi()
    with lock:
        world = module.COMM_WORLD
        on_this_host = world.Split_type(module.COMM_TYPE_SHARED)
        shared = bool(on_this_host.size == world.size)
        on_this_host.Free()
        return "127.0.0.1" if shared else from_rank_zero(str(module.Get_processor_name()))


def from_rank_zero(value: T) -> T:
    """Return what rank 0 of COMM_WORLD gave; collective."""
    with lock:
        told: T = mpi().COMM_WORLD.bcast(value)
    return told


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


@cache
def finalize_in_order(before: Callable[[], None]) -> None:
    """Have MPI end at exit: on all ranks together, or not at all when one has failed.

    Args:
        before: Called first; afterwards nothing may call MPI.
    """
    atexit.register(_finalize, before)


def _finalize(before: Callable[[], None]) -> None:
    before()
    module = mpi()
    if module.Is_finalized() or module.COMM_WORLD.size == 1:
        return
    if _has_failed() or not _meet(timedelta(seconds=LEAVE_SECONDS)):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    module.Finalize()


def _has_failed() -> bool:
    """Say whether the interpreter ends because of an exception, which it has printed by now."""
    return getattr(sys, "last_value", None) is not None


def _meet(timeout: timedelta) -> bool:
    with lock:
        request = mpi().COMM_WORLD.Ibarrier()
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        with lock:
            if request.Test():
                return True
        time.sleep(0.001)
    return False
