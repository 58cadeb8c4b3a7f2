"""shm: CPU ranks of one host over shared memory."""

import platform
import sys
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_shard.backends import _c10d
from lightning_shard.backends._c10d import Store
from lightning_shard.backends.base import Backend
from lightning_shard.backends.debug_wrapper import register_debug
from lightning_shard.backends.rendezvous import is_on_one_host, join_world
from lightning_shard.backends.shm.collectives import ShmCollectives
from lightning_shard.backends.shm.doorbell import SYSTEM_CALLS
from lightning_shard.backends.shm.process_group import BACKEND_NAME, ShmGroup
from lightning_shard.errors import ConfigError


class ShmBackend(Backend):
    """CPU tensors of one host: read where they lie, or through one copy."""

    name: ClassVar[str] = BACKEND_NAME
    device_types: ClassVar[tuple[str, ...]] = ("cpu",)

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
    def init_process_group(
        self,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: timedelta,
        store: Store | None = None,
    ) -> None:
        if not is_on_one_host(store):
            raise ConfigError(
                "shm: got ranks on several hosts, expected one: its ranks share memory. Pass "
                "backend='gloo', which reaches over hosts."
            )
        join_world(
            self.c10d_name,
            rank=rank,
            world_size=world_size,
            device=None,
            timeout=timeout,
            store=store,
        )

    @override
    def collectives(self, group: dist.ProcessGroup) -> ShmCollectives:
        return ShmCollectives(group)


def _make_group(options: Any, backend_options: Any) -> Any:
    """Make this rank's handle of a group; c10d calls this function."""
    del backend_options
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return ShmGroup(options.group_id, ranks, options.group_rank, options.timeout, options.store)


_c10d.register_backend(BACKEND_NAME, _make_group, ["cpu"])
register_debug(BACKEND_NAME, _make_group, ["cpu"])
