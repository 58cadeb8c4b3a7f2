"""Ranks of several hosts: processes here that pretend to be on others."""

import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.shm import backend as shm_backend
from lightning_shard.backends.shm.process_group import ShmGroup
from lightning_shard.backends.shm.two_levels import TwoLevelGroup
from lightning_shard.errors import RankFailedError
from tests.backends.shm.test_process_group import error_of, join
from tests.processes import rank_and_world_size, run_processes

NUMEL = 100_003  # divided by no number of ranks
HALVES = 256.0, 0.9, 0.05, 0.1  # 258 in bfloat16, but 256 where a host rounds its own sum first


def join_on(hosts: str) -> Collectives:
    own = hosts[rank_and_world_size()[0]]
    patch.object(shm_backend, "own_host", lambda: own).start()
    return join()


def many_at_once(hosts: str) -> list[bool]:
    collectives = join_on(hosts)
    rank, size = collectives.rank, collectives.size
    given = [torch.arange(NUMEL, dtype=torch.float64) * (rank + step) for step in range(6)]
    works = [dist.all_reduce(one, async_op=True) for one in given]
    full = torch.arange(size * NUMEL, dtype=torch.float32) + rank
    part, brought = torch.empty(NUMEL), torch.empty(size * NUMEL)
    scattering = collectives.reduce_scatter(part, full, "avg", async_op=True)
    gathering = collectives.all_gather(brought, torch.full((NUMEL,), rank + 0.5), async_op=True)
    for work in (gathering, scattering):
        work.wait()
    for one in reversed(works):
        one.wait()  # type: ignore[union-attr]
    base = torch.arange(NUMEL, dtype=torch.float64)
    sums = [base * sum(other + step for other in range(size)) for step in range(6)]
    offset = rank * NUMEL + sum(range(size)) / size
    found = [torch.equal(*pair) for pair in zip(given, sums, strict=True)]
    found.append(torch.allclose(part, torch.arange(NUMEL) + offset))
    found.append(torch.equal(brought.view(size, -1)[:, 0], torch.arange(size) + 0.5))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    "hosts", ["AABB", *(pytest.param(one, marks=pytest.mark.slow) for one in ("ABBA", "AAB"))]
)
def test_operations_in_flight_end_in_any_order(hosts: str) -> None:
    assert run_processes(many_at_once, len(hosts), hosts=hosts) == [[True] * 8] * len(hosts)


def halves_and_kinds(hosts: str) -> list[object]:
    collectives = join_on(hosts)
    halves = torch.full((NUMEL,), HALVES[collectives.rank], dtype=torch.bfloat16)
    collectives.all_reduce(halves, "sum").wait()
    own = dist.new_group([0, 1])
    kinds = [type(dist.group.WORLD), type(own) if collectives.rank < 2 else ShmGroup]
    dist.destroy_process_group()
    return [halves[0].item(), *kinds]


@pytest.mark.slow
def test_halves_are_rounded_once_for_all_hosts() -> None:
    """Halves were rounded on each host."""
    found = run_processes(halves_and_kinds, 4, hosts="AABB")
    assert found == [[258.0, TwoLevelGroup, ShmGroup]] * 4


def die(hosts: str) -> tuple[str, str]:
    collectives = join_on(hosts)
    full = collectives.new_empty(torch.empty(0), 1 << 20)
    if collectives.rank == 3:
        collectives.all_reduce(full).wait()
        os._exit(0)
    # rank 3 may be gone before others have ended its one operation
    return error_of(lambda: [collectives.all_reduce(full).wait() for _ in range(4)])


def test_a_rank_that_dies_on_another_host_is_named() -> None:
    found = run_processes(die, 4, hosts="AABB", vanishing_ranks=[3])
    for kind, message in found[:3]:
        assert kind == RankFailedError.__name__
        assert "rank 3" in message
