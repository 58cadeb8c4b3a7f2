"""This process's heap: memory that the other ranks of the host map, and tensors in it.

    file without a name    | used | idle |   hole   | used |          hole ...            |
                             4 x the host's memory of addresses; only what is used or idle
                             takes any

Before a range is used its pages are taken (`posix_fallocate`), so that a host without memory is an
error here, and no signal in the middle of a step. What is given back stays idle up to a limit,
since fresh pages cost as much as copying them. What an owner sets aside stays a tensor until
somebody needs the memory.

A rank that waits spins a little, yields its core, and then sleeps here, by Linux's futex, until a
peer has news. Who has news writes its board first and rings then.
"""

import ctypes
import errno
import mmap
import os
import platform
import weakref
from collections.abc import Callable
from functools import cache, partial
from threading import Lock, RLock
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_shard.backends.free_memory import free_host_bytes
from lightning_shard.errors import BackendUnavailableError

NUM_BYTES = 8
SYSTEM_CALLS = {"x86_64": 202}  # of `futex`, by machine
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Doorbell:
    """The doorbell of one process, as itself or a peer has it mapped."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._words = memoryview(memory)[:NUM_BYTES].cast("I")  # changes at each ring; sleepers
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._system_call = ctypes.CDLL(None, use_errno=True).syscall
        self._number = SYSTEM_CALLS.get(platform.machine(), -1)
        self._lock = Lock()
        self._sleepers = 0

    def listen(self) -> int:
        """Say that this process may sleep; return the word for `sleep`; look for news between."""
        with self._lock:
            self._sleepers += 1
            self._words[1] = self._sleepers
        return self._words[0]

    def sleep(self, word: int, seconds: float) -> None:
        """Sleep until somebody rings, unless that has happened since `listen`, or for so long."""
        limit = _TimeSpec(int(seconds), int(seconds % 1 * 1e9))
        self._futex(_WAIT, word, ctypes.byref(limit))

    def end_sleep(self) -> None:
        """Say that this process is awake."""
        with self._lock:
            self._sleepers -= 1
            self._words[1] = self._sleepers

    def ring(self) -> None:
        """Wake the process, if it sleeps."""
        if self._words[1]:
            self._words[0] = perf_counter_ns() & 0xFFFFFFFF
            self._futex(_WAKE, _EVERYBODY, None)

    def _futex(self, operation: int, value: int, limit: object) -> None:
        place = ctypes.c_long(self._number), ctypes.c_void_p(self._address)
        word = ctypes.c_uint(value)
        self._system_call(*place, ctypes.c_int(operation), word, limit, None, ctypes.c_int(0))


PAGE_BYTES = 4096
IDLE_LIMIT_BYTES = 64 << 20
_LEAST_ADDRESSES = 64 << 30
_COARSE_BYTES = 1 << 20
_KEEP_SIZE_PUNCH_HOLE = 3  # of Linux's fallocate


class Block(NamedTuple):
    """A range of the heap, in bytes."""

    offset: int
    size: int


class _Aside(NamedTuple):
    """What its owner does not use: its size in bytes, and a weak reference to what lets it go."""

    size: int
    let_go: weakref.WeakMethod[Callable[[], None]]


class Heap:
    """Memory that peers map: so many bytes of addresses, of which only those in use take any."""

    def __init__(self, addresses: int) -> None:
        self._owner = os.getpid()
        self.addresses = addresses
        self.fd = os.memfd_create("lightning_shard", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, addresses)
            self.memory = mmap.mmap(self.fd, addresses)
        except OSError as error:
            os.close(self.fd)
            raise BackendUnavailableError(
                f"The backend 'shm' cannot run here: it got no {addresses >> 30} GiB of addresses "
                f"({error}); they take no memory. Lift the limits of this process (ulimit -v, "
                f"ulimit -f), or pass backend='gloo'."
            ) from error
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._lock = RLock()  # a tensor may go wherever Python collects garbage
        self._idle: list[Block] = []
        self._aside: dict[int, _Aside] = {}  # by offset, the oldest first
        self._holes = [Block(PAGE_BYTES, addresses - PAGE_BYTES)]
        self.used_bytes = 0
        os.posix_fallocate(self.fd, 0, PAGE_BYTES)
        self.doorbell = Doorbell(self.memory)

    @property
    def idle_bytes(self) -> int:
        """Bytes that nobody uses and that are kept."""
        aside = sum(one.size for one in list(self._aside.values()))  # garbage may go meanwhile
        return aside + sum(block.size for block in self._idle)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor, shape (numel,), in the heap, whose memory is given back when it goes."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        block = self._take(_rounded(numel * dtype.itemsize))
        span = (ctypes.c_char * block.size).from_buffer(self.memory, block.offset)
        end = weakref.finalize(span, partial(self._give_back, block))
        end.atexit = False
        return torch.frombuffer(span, dtype=dtype, count=numel)

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return where a tensor's first element lies in the heap, or None if it lies elsewhere."""
        offset = tensor.data_ptr() - self._base
        return offset if 0 < offset < self.addresses else None

    def set_aside(self, tensor: Tensor, let_go: Callable[[], None]) -> bool:
        """Let others have the memory of a tensor that its owner does not use until `take_up`."""
        offset = self.offset_of(tensor)
        if offset is None:
            return False
        with self._lock:
            self._aside[offset] = _Aside(_rounded(tensor.nbytes), weakref.WeakMethod(let_go))
            self._keep_to_limit()
        return True

    def take_up(self, tensor: Tensor) -> None:
        """Use a tensor again that was set aside."""
        with self._lock:
            self._aside.pop(tensor.data_ptr() - self._base, None)

    def _let_one_go(self) -> None:
        """Let the owner of what was set aside first give its memory back."""
        first = self._aside.pop(next(iter(list(self._aside)), -1), None)
        let_go = None if first is None else first.let_go()
        if let_go is not None:
            let_go()

    def _take(self, size: int) -> Block:
        with self._lock:
            block = self._cut_idle(size)
            while block is None and self._aside:
                self._let_one_go()
                block = self._cut_idle(size)
            if block is not None:
                self.used_bytes += size
                return block
            block = self._cut_hole(size)
            try:
                self._take_pages(block)
            except OSError as error:
                self._fill_hole(block)
                raise BackendUnavailableError(
                    f"The backend 'shm' got no {size} bytes of shared memory: {error}. It has "
                    f"{self.used_bytes} bytes in this process, for parameters, gradients and "
                    f"messages. Give the job more memory, use fewer ranks on this host, or pass "
                    f"backend='gloo'."
                ) from error
            self.used_bytes += size
            return block

    def _cut_idle(self, size: int) -> Block | None:
        """Return a part of the smallest idle range that is large enough; its pages are there."""
        fitting = [block for block in self._idle if block.size >= size]
        if not fitting:
            return None
        found = min(fitting, key=lambda block: block.size)
        self._idle.remove(found)
        if found.size > size:
            self._idle.insert(0, Block(found.offset + size, found.size - size))
        return Block(found.offset, size)

    def _take_pages(self, block: Block) -> None:
        """Have the system give the memory now: later it would end this process for want of it."""
        free = free_host_bytes() if block.size >= _COARSE_BYTES else None
        if free is not None and free < block.size:
            raise OSError(errno.ENOMEM, f"the host has {free} bytes left")
        os.posix_fallocate(self.fd, block.offset, block.size)

    def _cut_hole(self, size: int) -> Block:
        for index, hole in enumerate(self._holes):
            if hole.size >= size:
                self._holes[index] = Block(hole.offset + size, hole.size - size)
                return Block(hole.offset, size)
        raise BackendUnavailableError(
            f"The backend 'shm' has no range of {size} bytes left among {self.addresses} bytes of "
            f"addresses. Pass backend='gloo'."
        )

    def _give_back(self, block: Block) -> None:
        if os.getpid() != self._owner:
            return  # a forked child's copy of a tensor: the memory is the parent's
        with self._lock:
            self.used_bytes -= block.size
            self._aside.pop(block.offset, None)
            self._idle.append(self._merged_with_idle(block))
            self._keep_to_limit()

    def _keep_to_limit(self) -> None:
        while (excess := self.idle_bytes - IDLE_LIMIT_BYTES) > 0:
            if not self._idle:
                self._let_one_go()  # whose memory is idle then, unless others hold it
                continue
            oldest = self._idle.pop(0)
            kept = max(oldest.size - excess, 0)
            freed = Block(oldest.offset + kept, oldest.size - kept)
            # The pages go back to the system; they read as zeros from then on.
            _fallocate()(self.fd, _KEEP_SIZE_PUNCH_HOLE, freed.offset, freed.size)
            self._fill_hole(freed)
            if kept:
                self._idle.insert(0, Block(oldest.offset, kept))

    def _merged_with_idle(self, block: Block) -> Block:
        """Return a range with the idle ones that it touches, which are idle no longer."""
        for other in list(self._idle):
            if other.offset in (block.offset + block.size, block.offset - other.size):
                self._idle.remove(other)
                block = Block(min(block.offset, other.offset), block.size + other.size)
        return block

    def _fill_hole(self, block: Block) -> None:
        """Let a range be a hole again, one with the holes that it touches."""
        merged: list[Block] = []
        for hole in sorted([*self._holes, block]):
            if merged and merged[-1].offset + merged[-1].size == hole.offset:
                merged[-1] = Block(merged[-1].offset, merged[-1].size + hole.size)
            elif hole.size:
                merged.append(hole)
        self._holes = merged


def _rounded(num_bytes: int) -> int:
    step = PAGE_BYTES if num_bytes < _COARSE_BYTES else _COARSE_BYTES // 16
    return -(-num_bytes // step) * step


@cache
def _fallocate() -> Any:
    function = ctypes.CDLL(None, use_errno=True).fallocate
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    return function


_heap: Heap | None = None


def own_heap() -> Heap:
    """Return this process's heap, which is made when it is first asked for."""
    global _heap
    if _heap is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        _heap = Heap(max(4 * memory, _LEAST_ADDRESSES) // PAGE_BYTES * PAGE_BYTES)
    return _heap


def _forget_in_child() -> None:
    """A forked child (a DataLoader's worker) is no rank; it makes a heap of its own if need be."""
    global _heap
    _heap = None


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_in_child)
