"""Which ranks of a group are on one host, in one container: those can map each other's memory."""

import os
from functools import cache
from pathlib import Path

from lightning_shard.backends._c10d import Store


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
