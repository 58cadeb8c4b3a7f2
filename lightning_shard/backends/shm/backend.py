"""shm: CPU ranks over shared memory, and over Gloo between hosts.

`ShmCollectives`, the facade over a group, says what buffers are made of, and who averages.
"""

import ctypes
import mmap
import os
import platform
import sys
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_shard.backends import _c10d
from lightning_shard.backends._c10d import PrefixStore
from lightning_shard.backends.base import GlooBackend
from lightning_shard.backends.collectives import Collectives, CommonBuffer, copy_unless_same
from lightning_shard.backends.debug_wrapper import register_debug
from lightning_shard.backends.free_memory import free_host_bytes
from lightning_shard.backends.group_handle import ranks_of
from lightning_shard.backends.pending import Pending, StartedTransfer
from lightning_shard.backends.python_group import PythonGroup
from lightning_shard.backends.rank_order import C10D_OPS, ReduceOpName
from lightning_shard.backends.shm.heap import PAGE_BYTES, SYSTEM_CALLS, own_heap
from lightning_shard.backends.shm.peers import open_file
from lightning_shard.backends.shm.process_group import BACKEND_NAME, ShmGroup
from lightning_shard.backends.shm.two_levels import TwoLevelGroup
from lightning_shard.errors import BackendUnavailableError

_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_FIXED, _NO_RESERVE = 0x10, 0x4000  # of Linux's mmap, which Python does not name everywhere
_DONT_NEED = 4
_FAILED = ctypes.c_void_p(-1).value
_ENTRY_BYTES = 8  # of the page map
_OF_FILE, _SWAPPED = 1 << 61, 1 << 62  # bits of an entry; that a page is present is its sign


class CopyOnWrite:
    """A file in memory as this process sees it: its writes are its own; it ends with the mapping.

    A write to `common`, the file itself, is seen by all. Both are bytes, of shape (num_bytes,).
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


class SharedFile(CommonBuffer):
    """The common buffer of a group on shared memory, in a file in memory that each rank maps.

    Its first rank makes the file, the others open it below `/proc/<process>/fd`. Each rank may edit
    it for itself, by Linux's copy-on-write:

        file       [ p0 | p1 | p2 | p3 ]       one copy on the host
        process A  [  .  | p1'|  .  |  . ]     reads it until it writes: then the page is its own
        process B  [  .  |  . |  .  |  . ]     does not see p1'

    What is written in a range that is opened is in the file, for all to see. Which pages are a
    process's own is read from `/proc/self/pagemap`, some 10 ns for each.
    """

    def __init__(
        self, ranks: Collectives, memory: CopyOnWrite, dtype: torch.dtype, start: int, stop: int
    ) -> None:
        self.group = ranks.group
        self._ranks, self._memory = ranks, memory
        self._own, self._common = memory.own.view(dtype), memory.common.view(dtype)
        self._part = slice(start, stop)
        self._bytes = start * dtype.itemsize, stop * dtype.itemsize
        self._is_open = self._has_left = self._has_edits = False

    @property
    @override
    def tensor(self) -> Tensor:
        return self._own

    @property
    @override
    def part(self) -> Tensor:
        return (self._own if self._has_left else self._common)[self._part]

    @override
    def meet(self) -> None:
        self._ranks.barrier()

    @override
    def open(self) -> None:
        if self._is_open or self._has_left:
            return
        if self._memory.has_edits(*self._bytes):
            self.write_part()
        self._memory.open(*self._bytes)
        self._is_open = True

    @override
    def give_edits(self) -> None:
        if self._is_open or self._has_left or not self._memory.has_edits(*self._bytes):
            return
        self.write_part()
        self._memory.forget_edits(*self._bytes)

    @override
    def gather(self) -> Pending:
        group: Any = self.group
        return self._ranks.start(
            "all_gather", lambda: StartedTransfer(works=[group.gather_common(self)])
        )

    @override
    def leave(self) -> Tensor:
        self._own = self._own.clone()
        if not self._has_left:
            self._close()
            self._memory.separate()
        self._has_left = True
        return self._own

    # --- for the operation that gathers ---------------------------------------------------------

    def look(self) -> bool:
        """Return whether this rank has edits of its own part, and note whether of any."""
        self._has_edits = self._has_left or self._memory.has_edits(0, self._memory.own.numel())
        return self._has_left or (self._has_edits and self._memory.has_edits(*self._bytes))

    def write_part(self) -> None:
        """Write this rank's part for all."""
        self._common[self._part].copy_(self._own[self._part])
        self._memory.rest()

    def see(self) -> None:
        """See what all ranks have written, and edit alone from now on."""
        if self._has_left:
            self._own.copy_(self._common)
            self._memory.rest()
            return
        self._close()
        if self._has_edits:
            self._memory.forget_edits(0, self._memory.own.numel())

    def _close(self) -> None:
        if self._is_open:
            self._memory.close(*self._bytes)
            self._is_open = False


def share(ranks: Collectives, values: Tensor, start: int, stop: int) -> SharedFile | None:
    """Return a common buffer with this rank's part of `values`; each rank must call."""
    size = pages(values.nbytes) * PAGE_BYTES
    file, problem = -1, ""
    able = works_here()
    if able and ranks.rank == 0:
        try:
            file = _make(size)
        except OSError as error:
            problem = str(error)
    place = (os.getpid(), file, os.fstat(file).st_ino) if file >= 0 else None
    told = ranks.all_gather_object((able, place, problem))
    if not all(one for one, _, _ in told):
        return None
    _, first, problem = told[0]
    if first is None:
        raise BackendUnavailableError(
            f"The backend 'shm' got no {size} bytes of shared memory: {problem}. It "
            f"has {own_heap().used_bytes} bytes in this process. Give the job more memory, use "
            f"fewer ranks on this host, or pass backend='gloo'."
        )
    file = open_file(*first) if ranks.rank else file
    made = SharedFile(ranks, CopyOnWrite(file, values.nbytes), values.dtype, start, stop)
    made._common[start:stop].copy_(values[start:stop])
    made._memory.rest()
    ranks.barrier()
    return made


def _make(size: int) -> int:
    free = free_host_bytes()
    if free is not None and free < size:
        raise OSError(f"the host has {free} bytes left")
    file = os.memfd_create("lightning_shard", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(file, 0, size)
    except OSError:
        os.close(file)
        raise
    return file


_OPS = C10D_OPS | {"avg": dist.ReduceOp.AVG}  # a sum in float32 for halves, rounded once


class ShmCollectives(Collectives):
    """Collectives whose flat buffers lie where peers read them in place."""

    @override
    def new_empty(
        self,
        like: Tensor,
        numel: int,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        if (device or like.device).type != "cpu" or not _has_memory(like):
            return super().new_empty(like, numel, dtype, device)
        return own_heap().empty(numel, dtype or like.dtype)

    @override
    def set_aside(self, flat: Tensor, let_go: Callable[[], None]) -> bool:
        return own_heap().set_aside(flat, let_go)

    @override
    def take_up(self, flat: Tensor) -> None:
        own_heap().take_up(flat)

    @override
    def share(self, values: Tensor, start: int, stop: int) -> CommonBuffer | None:
        can = self._group.shares_host and self.size > 1 and values.numel() > 0
        is_here = values.device.type == "cpu" and _has_memory(values)
        return share(self, values, start, stop) if can and is_here else None

    @override
    def _reduce_scatter_dtype(
        self, output: Tensor, source: Tensor, op: ReduceOpName
    ) -> torch.dtype:
        return torch.float32 if output.dtype != source.dtype else source.dtype

    @override
    def _reduce_scatter(self, output: Tensor, source: Tensor, op: ReduceOpName) -> StartedTransfer:
        if self._is_still(output):
            return copy_unless_same(output, source)
        if output.dtype != source.dtype:
            return super()._reduce_scatter(output, source, op)
        work = self._group.reduce_scatter_single(output, source, _OPS[op])
        return StartedTransfer(works=[work])

    @override
    def _all_gather(self, output: Tensor, source: Tensor) -> StartedTransfer:
        if self._is_still(output):
            return copy_unless_same(output, source)
        return StartedTransfer(works=[self._group.all_gather_single(output, source)])

    @override
    def _reduce_slices(
        self, output: Tensor, source: Tensor, sizes: list[int], op: ReduceOpName
    ) -> StartedTransfer:
        if output.dtype != source.dtype:
            return super()._reduce_slices(output, source, sizes, op)
        slices = list(torch.split(source, sizes))
        return StartedTransfer(works=[self._group.reduce_scatter([output], [slices], _OPS[op])])

    @override
    def _gather_slices(self, output: Tensor, source: Tensor, sizes: list[int]) -> StartedTransfer:
        slices = list(torch.split(output, sizes))
        return StartedTransfer(works=[self._group.allgather([slices], [source])])

    @property
    def _group(self) -> PythonGroup:
        return cast("PythonGroup", self.group)  # or one that compares first, with its methods


def _has_memory(like: Tensor) -> bool:
    """Whether what is made like a tensor has elements: a fake one's has none."""
    return type(like) in (Tensor, torch.nn.Parameter)


@cache
def own_host() -> str:
    """Return what tells this host, and this container's view of its processes, from others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


class ShmBackend(GlooBackend):
    """CPU tensors: read where they lie on one host, or through one copy; sent between hosts."""

    name: ClassVar[str] = BACKEND_NAME

    @override
    def unavailable_reason(self) -> str | None:
        if sys.platform != "linux":
            return "it needs Linux's shared memory without names. Pass backend='gloo'."
        if platform.machine() not in SYSTEM_CALLS:
            return (
                f"this is {platform.machine()}, and it has been proved on "
                f"{', '.join(SYSTEM_CALLS)} alone, which keeps stores in order. Pass "
                f"backend='gloo'."
            )
        return None

    @override
    def collectives(self, group: dist.ProcessGroup) -> ShmCollectives:
        return ShmCollectives(group)


def _make_group(options: Any, backend_options: Any) -> Any:
    """Make this rank's handle of a group; c10d calls this function."""
    del backend_options
    rank, size = options.group_rank, options.group_size
    corner = PrefixStore(f"shm/{options.store.add(f'shm/made/{rank}', 1)}", options.store)
    corner.set(f"host/{rank}", own_host())
    hosts = [corner.get(f"host/{peer}").decode() for peer in range(size)]
    if len({*hosts}) == 1:
        return ShmGroup(options.group_id, ranks_of(options), rank, options.timeout, corner)
    return TwoLevelGroup(options, corner, hosts)


_c10d.register_backend(BACKEND_NAME, _make_group, ["cpu"])
register_debug(BACKEND_NAME, _make_group, ["cpu"])
