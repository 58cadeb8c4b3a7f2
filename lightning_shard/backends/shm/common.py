"""A buffer that the ranks of one group have in common, in a file in memory that each maps.

Its first rank makes the file, the others open it below `/proc/<process>/fd`; it has no name, and
goes with the last process that maps it.
"""

import os
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.common_buffer import CommonBuffer
from lightning_shard.backends.free_memory import free_host_bytes
from lightning_shard.backends.pending import Pending, StartedTransfer
from lightning_shard.backends.shm.copy_on_write import CopyOnWrite, pages, works_here
from lightning_shard.backends.shm.heap import PAGE_BYTES, own_heap
from lightning_shard.backends.shm.peers import open_file
from lightning_shard.errors import BackendUnavailableError


class SharedFile(CommonBuffer):
    """The common buffer of a group on shared memory.

    Args:
        ranks: The group whose ranks have it.
        memory: The mapped file.
        dtype: Format of the elements.
        start: First element of this rank's part.
        stop: End of this rank's part.
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
        self._ranks.traffic.count("all_gather", 0, self._own.itemsize)  # nothing is sent
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
    """Return a common buffer with the values of a tensor; each rank of the group must call.

    Args:
        ranks: The group, whose ranks are on one host.
        values: Shape (F,); this rank's part of it is taken.
        start: First element of this rank's part.
        stop: End of this rank's part.

    Returns:
        None where the system of a rank cannot.

    Raises:
        BackendUnavailableError: The host has no memory for it.
        ConfigError: A process is another user's, or cannot be seen from here.
        RankFailedError: A rank has ended.
    """
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
