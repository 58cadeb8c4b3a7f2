"""Collectives over real Gloo processes: what a lost peer looks like."""

import os
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends.base import Backend, GlooBackend
from lightning_shard.backends.exchange import ExchangeCollectives
from lightning_shard.errors import RankFailedError
from tests.processes import rank_and_world_size, run_processes


def join(backend: Backend) -> ExchangeCollectives:
    rank, world_size = rank_and_world_size()
    cpu = torch.device("cpu")
    backend.check(cpu)
    backend.init_process_group(
        rank=rank, world_size=world_size, device=cpu, timeout=timedelta(seconds=30)
    )
    assert dist.group.WORLD is not None
    collectives = backend.collectives(dist.group.WORLD)
    assert isinstance(collectives, ExchangeCollectives)
    return collectives


def lose_a_peer() -> dict[str, str]:
    collectives = join(GlooBackend())
    collectives.barrier()
    if collectives.rank == 1:
        os._exit(0)
    full, large, local = torch.zeros(6), torch.zeros(100_000), torch.zeros(2)
    calls: dict[str, Callable[[], object]] = {
        "reduce_scatter": lambda: collectives.reduce_scatter(local, full, async_op=True).wait(),
        "all_gather": lambda: collectives.all_gather(full, local),
        "all_reduce": lambda: collectives.all_reduce(large),
        "recv": lambda: collectives.recv(local, 1),
        "barrier": collectives.barrier,
        "all_gather_object": lambda: collectives.all_gather_object(1),
    }
    messages = {}
    for operation, call in calls.items():
        with pytest.raises(RankFailedError) as caught:
            call()
        messages[operation] = str(caught.value)
    dist.destroy_process_group()
    return messages


def test_a_lost_peer_is_named_by_rank_and_operation() -> None:
    results = run_processes(lose_a_peer, 3, vanishing_ranks={1})
    for rank in (0, 2):
        for operation, message in results[rank].items():
            assert f"Rank {rank} of 3 lost a peer in {operation}: rank 1 died" in message
