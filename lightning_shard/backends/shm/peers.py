"""The other ranks' heaps, mapped; and how the ranks of a group find them.

Linux shows a process's open files to others of its user, below `/proc/<process>/fd`; there a peer
opens a heap, as told in the job's store, and makes sure that it is the file that was meant.
"""

import json
import mmap
import os
import select
from contextlib import suppress
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lightning_shard.backends._c10d import Store
from lightning_shard.backends.shm.heap import Doorbell, own_heap
from lightning_shard.errors import ConfigError, RankFailedError


class PeerHeap:
    """A peer's heap, or this process's own as its peers see it."""

    def __init__(self, process: int, fd: int, inode: int, size: int) -> None:
        self.process = process
        self._ended = False
        self._watch: int | None = None
        if process == os.getpid():  # one mapping, so that addresses compare
            self.memory, self.doorbell = own_heap().memory, own_heap().doorbell
            return
        opened = open_file(process, fd, inode)
        try:
            self.memory = mmap.mmap(opened, size)
        finally:
            os.close(opened)
        self.doorbell = Doorbell(self.memory)
        with suppress(OSError):
            self._watch = os.pidfd_open(process)

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return elements of the heap, shape (numel,), where they lie."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=offset)

    def words(self, offset: int, count: int) -> memoryview:
        """Return so many 64-bit words of the heap."""
        return memoryview(self.memory)[offset : offset + 8 * count].cast("q")

    @property
    def has_ended(self) -> bool:
        """Whether the process is known to have ended."""
        if not self._ended and self._watch is not None:
            self._ended = bool(select.select([self._watch], [], [], 0)[0])
        return self._ended

    def __del__(self) -> None:
        watch = getattr(self, "_watch", None)
        if watch is not None:
            os.close(watch)


_mapped: WeakValueDictionary[tuple[int, int], PeerHeap] = WeakValueDictionary()


def open_file(process: int, fd: int, inode: int) -> int:
    """Open a file that a process of this host has open; return its number here."""
    place = f"/proc/{process}/fd/{fd}"
    try:
        opened = os.open(place, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise _gone(process) from error
    except OSError as error:
        raise ConfigError(
            f"shm: got no access to {place}, the memory of a rank on this host: {error}. "
            f"Start all ranks as one user in one container, or pass backend='gloo'."
        ) from error
    if os.fstat(opened).st_ino != inode:
        os.close(opened)
        raise _gone(process)
    return opened


def _gone(process: int) -> RankFailedError:
    return RankFailedError(
        f"shm: the rank in process {process} has ended before its peers could reach its memory. "
        f"Look for the first error among the other ranks' output."
    )


def meet(store: Store, rank: int, size: int, board: int) -> tuple[list[PeerHeap], list[int]]:
    """Map the heaps of a group's ranks; each of them must call."""
    heap = own_heap()
    inode = os.fstat(heap.fd).st_ino
    own = {"place": (os.getpid(), heap.fd, inode, heap.addresses), "board": board}
    store.set(f"heap/{rank}", json.dumps(own))
    told = [json.loads(store.get(f"heap/{peer}")) for peer in range(size)]
    return [_map(*one["place"]) for one in told], [one["board"] for one in told]


def _map(process: int, fd: int, inode: int, size: int) -> PeerHeap:
    heap = _mapped.get((process, inode))
    if heap is None:
        heap = _mapped[process, inode] = PeerHeap(process, fd, inode, size)
    return heap
