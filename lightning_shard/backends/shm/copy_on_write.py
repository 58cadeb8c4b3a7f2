"""Memory that several processes see and each may edit for itself: Linux's copy-on-write.

    file       [ p0 | p1 | p2 | p3 ]       one copy on the host
    process A  [  .  | p1'|  .  |  . ]     reads the file, until it writes: then the page is its own
    process B  [  .  |  . |  .  |  . ]     does not see p1'

A range may be opened for a while: what is written there is then in the file, for all to see. Which
pages a process has of its own is read from `/proc/self/pagemap`, some 10 ns for each.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_shard.backends.shm.heap import PAGE_BYTES

_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FIXED, _NO_RESERVE = 0x10, 0x4000  # of Linux's mmap, which Python does not name everywhere
_DONT_NEED = 4
_FAILED = ctypes.c_void_p(-1).value
_ENTRY_BYTES = 8  # of the page map
_OF_FILE, _SWAPPED = 1 << 61, 1 << 62  # bits of an entry; that a page is present is its sign


class CopyOnWrite:
    """A file in memory as this process sees it: its writes are its own.

    Args:
        file: Number of an open file; it is closed with the mapping.
        num_bytes: Size of the file.

    Attributes:
        own: The memory with this process's edits, shape (num_bytes,), uint8.
        common: The file itself, where a write is seen by all.
    """

    def __init__(self, file: int, num_bytes: int) -> None:
        self._file, self._size = file, pages(num_bytes) * PAGE_BYTES
        self._address = _map(None, self._size, mmap.MAP_PRIVATE | _NO_RESERVE, file, 0)
        self._common_address = _map(None, self._size, mmap.MAP_SHARED, file, 0)
        self.own = _tensor(self._address, self._size)[:num_bytes]
        self.common = _tensor(self._common_address, self._size)[:num_bytes]
        _at_end(self, lambda: os.close(file))

    def has_edits(self, start: int, stop: int) -> bool:
        """Whether this process has pages of its own among these bytes."""
        first, end = start // PAGE_BYTES, pages(stop)
        return start < stop and bool(
            _is_own(self._address // PAGE_BYTES + first, end - first).any()
        )

    def open(self, start: int, stop: int) -> None:
        """Let writes of the pages of these bytes go to the file; edits of theirs are lost."""
        self._map_again(start, stop, mmap.MAP_SHARED)

    def close(self, start: int, stop: int) -> None:
        """End `open`: writes are this process's own again."""
        self._map_again(start, stop, mmap.MAP_PRIVATE | _NO_RESERVE)

    def forget_edits(self, start: int, stop: int) -> None:
        """See the file again in the pages of these bytes."""
        first = start // PAGE_BYTES * PAGE_BYTES
        _advise(self._address + first, pages(stop) * PAGE_BYTES - first)

    def rest(self) -> None:
        """Let go of the pages of `common`, which stay in the file."""
        _advise(self._common_address, self._size)

    def separate(self) -> None:
        """Make every page this process's own: it no longer follows the file."""
        self.own.bitwise_or_(0)

    def _map_again(self, start: int, stop: int, flags: int) -> None:
        first = start // PAGE_BYTES * PAGE_BYTES
        size = pages(stop) * PAGE_BYTES - first
        if start < stop:
            _map(self._address + first, size, flags | _FIXED, self._file, first)


def pages(num_bytes: int) -> int:
    """Return how many pages so many bytes take."""
    return -(-num_bytes // PAGE_BYTES)


@cache
def works_here() -> bool:
    """Whether this system copies on write as meant, and tells which pages were."""
    try:
        file = os.memfd_create("lightning_shard", os.MFD_CLOEXEC)
        os.posix_fallocate(file, 0, 2 * PAGE_BYTES)
        memory = CopyOnWrite(file, 2 * PAGE_BYTES)
        memory.common.fill_(1)
        before = memory.has_edits(0, 2 * PAGE_BYTES) or int(memory.own[0]) != 1
        memory.own[PAGE_BYTES] = 2
        edits = [memory.has_edits(0, PAGE_BYTES), memory.has_edits(PAGE_BYTES, 2 * PAGE_BYTES)]
        return not before and edits == [False, True] and int(memory.common[PAGE_BYTES]) == 1
    except OSError:
        return False


@cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    number, address = ctypes.c_size_t, ctypes.c_void_p
    library.mmap.restype = address
    library.mmap.argtypes = (address, number, *[ctypes.c_int] * 3, ctypes.c_long)
    library.munmap.argtypes = (address, number)
    library.madvise.argtypes = (address, number, ctypes.c_int)
    return library


def _map(address: int | None, size: int, flags: int, file: int, offset: int) -> int:
    found = _library().mmap(address, size, _READ_AND_WRITE, flags, file, offset)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


def _advise(address: int, size: int) -> None:
    _library().madvise(address, size, _DONT_NEED)


def _tensor(address: int, size: int) -> Tensor:
    """Return mapped memory as a tensor, whose end unmaps it."""
    span = (ctypes.c_char * size).from_address(address)
    _at_end(span, lambda: _library().munmap(address, size))
    return torch.frombuffer(span, dtype=torch.uint8, count=size)


def _at_end(thing: Any, function: Callable[[], Any]) -> None:
    process = os.getpid()

    def run() -> None:
        if os.getpid() == process:  # a forked child has the parent's objects, and ends by itself
            function()

    weakref.finalize(thing, run).atexit = False


@cache
def _page_map(process: int) -> int:
    """Return the open page map of this process, whose number keeps a fork from its parent's."""
    del process
    return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)


def _is_own(first: int, count: int) -> Tensor:
    """Return for so many pages whether each is this process's own."""
    content = bytearray(count * _ENTRY_BYTES)
    got = os.preadv(_page_map(os.getpid()), [content], first * _ENTRY_BYTES)
    if got != len(content):
        raise OSError(f"/proc/self/pagemap gave {got} of {len(content)} bytes")
    entries = torch.frombuffer(content, dtype=torch.int64)
    is_there = (entries < 0) | ((entries & _SWAPPED) != 0)
    return is_there & ((entries & _OF_FILE) == 0)
