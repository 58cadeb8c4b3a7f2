"""Collectives over in-process ranks: the conformance suite, and groups of one rank."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.registry import get_backend
from lightning_shard.errors import RankFailedError
from lightning_shard.testing import Fault, run_ranks
from tests.backends.conformance import CHECKS


def world() -> Collectives:
    assert dist.group.WORLD is not None
    return get_backend("in_process").collectives(dist.group.WORLD)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_conformance(name: str, num_ranks: int) -> None:
    run_ranks(lambda rank: CHECKS[name](world()), num_ranks)


def test_one_rank_copies_only_what_lies_elsewhere() -> None:
    def body(rank: int) -> None:
        collectives = world()
        source, output = torch.arange(3.0), torch.zeros(3)
        version = source._version
        collectives.reduce_scatter(source, source)
        collectives.all_gather(source, source)
        assert source._version == version
        collectives.reduce_scatter(output, source)
        assert torch.equal(output, source)
        wide = torch.zeros(3)
        collectives.reduce_scatter(wide, source.bfloat16())
        assert torch.equal(wide, source)
        assert collectives.traffic.total_bytes == 0
        assert collectives.traffic["reduce_scatter"].calls == 3

    run_ranks(body, 1)


def test_a_widened_reduction_counts_the_bytes_on_the_wire() -> None:
    def body(rank: int) -> dict[str, int]:
        collectives = world()
        half = torch.ones(8, dtype=torch.bfloat16)
        collectives.reduce_scatter(torch.empty(4, dtype=torch.bfloat16), half)
        same = collectives.traffic.total_bytes
        collectives.reduce_scatter(torch.empty(4), half)
        return {"same": same, "widened": collectives.traffic.total_bytes - same}

    assert run_ranks(body, 2) == [{"same": 8, "widened": 16}] * 2


def test_a_dropped_peer_is_an_error() -> None:
    def body(rank: int) -> None:
        collectives = world()
        collectives.barrier()
        calls: list[Callable[[], object]] = [
            lambda: collectives.all_reduce(torch.ones(2)),
            lambda: collectives.all_gather(torch.ones(4), torch.ones(2)),
        ]
        for call in calls:
            with pytest.raises(RankFailedError):
                call()

    run_ranks(body, 2, faults=[Fault(rank=1, at_collective=2, kind="drop")])
