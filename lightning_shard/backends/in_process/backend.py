"""The in-process backend: ranks are threads of this process, one running at a time."""

from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from lightning_shard.backends import _c10d
from lightning_shard.backends._c10d import Store
from lightning_shard.backends.base import Backend
from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.exchange import ExchangeCollectives
from lightning_shard.backends.in_process.process_group import InProcessGroup
from lightning_shard.backends.in_process.world import BACKEND_NAME, World, current_world
from lightning_shard.errors import ConfigError

_HOW_TO_USE = (
    "The in_process backend works inside an in-process world only. Train with a strategy whose "
    "name ends in _in_process, or call your function with lightning_shard.testing.run_ranks(fn, 4)."
)


def _require_world() -> World:
    world = current_world()
    if world is None:
        raise ConfigError(_HOW_TO_USE)
    return world


def _make_group(options: Any, backend_options: Any) -> InProcessGroup:
    """Make the running rank's handle of a group; c10d calls this function."""
    del backend_options
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    return InProcessGroup(_require_world(), options.group_id, ranks, options.group_rank)


class InProcessBackend(Backend):
    """Ranks as threads, switched at collectives; for tests, notebooks, and many ranks per GPU."""

    name: ClassVar[str] = BACKEND_NAME
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def unavailable_reason(self) -> str | None:
        """Return None: it needs nothing that torch does not bring."""
        return None

    def init_process_group(
        self,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: timedelta,
        store: Store | None = None,
    ) -> None:
        """Start the running rank's default group, over the world's own store if none is given.

        Raises:
            ConfigError: No in-process world runs, or it has another rank or size.
        """
        del device
        world = _require_world()
        own_rank, size = world.group_rank
        if (rank, world_size) != (own_rank, size):
            raise ConfigError(
                f"in_process: got rank={rank}, world_size={world_size}, expected {own_rank} and "
                f"{size}, as in the in-process world that runs."
            )
        dist.init_process_group(
            self.name,
            store=world.new_init_store() if store is None else store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )

    def collectives(self, group: dist.ProcessGroup) -> Collectives:
        """Wrap a group; in a world that is like Gloo, in the exchanges that Gloo's groups have."""
        world = current_world()
        is_like_gloo = world is not None and world.is_like_gloo
        return (ExchangeCollectives if is_like_gloo else Collectives)(group)


_c10d.register_backend(BACKEND_NAME, _make_group, ["cpu", "cuda"])
