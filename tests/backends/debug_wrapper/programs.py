"""What the ranks of a checked group do in the tests; each function runs in a real process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_shard.backends.debug_wrapper import DebugExchange, DebugGroup, exchange_collectives
from lightning_shard.core import settings
from tests.processes import rank_and_world_size

_stores: list[
    dist.TCPStore
] = []  # one in each process: many worlds, one after the other, meet there


def meeting_place() -> dist.TCPStore:
    """Return the store of this process's peers."""
    if not _stores:
        rank, world_size = rank_and_world_size()
        place = settings.rendezvous()
        _stores.append(dist.TCPStore(place.host, place.port, world_size, rank == 0))
        settings.prefer_loopback_for_gloo()
    return _stores[0]


@contextmanager
def debug_world(name: str, timeout_seconds: float = 30) -> Iterator[DebugExchange]:
    """Start a checked Gloo world of this name, and end it."""
    rank, world_size = rank_and_world_size()
    dist.init_process_group(
        "checked_gloo",
        store=dist.PrefixStore(name, meeting_place()),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    assert isinstance(dist.group.WORLD, DebugGroup)
    collectives = exchange_collectives(dist.group.WORLD)
    assert isinstance(collectives, DebugExchange)
    try:
        yield collectives
    finally:
        dist.destroy_process_group()


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the name of what the call raised, and its message."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
