"""shm: CPU ranks over shared memory, and over Gloo between hosts."""

import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from typing_extensions import override

from lightning_shard.backends import _c10d
from lightning_shard.backends._c10d import PrefixStore, Store
from lightning_shard.backends.debug_wrapper import register_debug
from lightning_shard.backends.gloo import GlooBackend
from lightning_shard.backends.shm.collectives import ShmCollectives
from lightning_shard.backends.shm.doorbell import SYSTEM_CALLS
from lightning_shard.backends.shm.process_group import BACKEND_NAME, ShmGroup
from lightning_shard.backends.shm.two_levels import TwoLevelGroup


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
    ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
    corner = PrefixStore(f"shm/{options.store.add(f'shm/made/{rank}', 1)}", options.store)
    hosts = hosts_of_ranks(corner, rank, size)
    if len({*hosts}) == 1:
        return ShmGroup(options.group_id, ranks, rank, options.timeout, corner)
    return TwoLevelGroup(options.group_id, ranks, rank, options.timeout, corner, hosts)


_c10d.register_backend(BACKEND_NAME, _make_group, ["cpu"])
register_debug(BACKEND_NAME, _make_group, ["cpu"])
