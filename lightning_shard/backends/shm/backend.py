"""shm: CPU ranks over shared memory, and over Gloo between hosts.

`ShmCollectives`, the facade over a group, says what buffers are made of, and who averages.
"""

import os
import platform
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_shard.backends import _c10d
from lightning_shard.backends._c10d import PrefixStore, Store
from lightning_shard.backends.c10d_transfers import copy_unless_same
from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.common_buffer import CommonBuffer
from lightning_shard.backends.debug_wrapper import register_debug
from lightning_shard.backends.gloo import GlooBackend
from lightning_shard.backends.group_handle import ranks_of
from lightning_shard.backends.pending import StartedTransfer
from lightning_shard.backends.python_group import PythonGroup
from lightning_shard.backends.rank_order import C10D_OPS, ReduceOpName
from lightning_shard.backends.shm.common import share
from lightning_shard.backends.shm.doorbell import SYSTEM_CALLS
from lightning_shard.backends.shm.heap import own_heap
from lightning_shard.backends.shm.process_group import BACKEND_NAME, ShmGroup
from lightning_shard.backends.shm.two_levels import TwoLevelGroup

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

    @property
    @override
    def _own_backend(self) -> str | None:
        return self._group.getBackendName()

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


def hosts_of_ranks(store: Store, rank: int, size: int) -> list[str]:
    """Return each rank's host; each of them must call.

    Args:
        store: A store of this group alone.
        rank: This rank's number in the group.
        size: Number of ranks.
    """
    store.set(f"host/{rank}", own_host())
    return [store.get(f"host/{peer}").decode() for peer in range(size)]


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
    ranks = ranks_of(options)
    corner = PrefixStore(f"shm/{options.store.add(f'shm/made/{rank}', 1)}", options.store)
    hosts = hosts_of_ranks(corner, rank, size)
    if len({*hosts}) == 1:
        return ShmGroup(options.group_id, ranks, rank, options.timeout, corner)
    return TwoLevelGroup(options.group_id, ranks, rank, options.timeout, corner, hosts)


_c10d.register_backend(BACKEND_NAME, _make_group, ["cpu"])
register_debug(BACKEND_NAME, _make_group, ["cpu"])
