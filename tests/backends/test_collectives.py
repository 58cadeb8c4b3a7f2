"""Collectives: groups of one rank, counters per group, a lost peer. The rest: test_conformance."""

import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import LayoutError, RankFailedError
from lightning_shard.testing import Fault, run_ranks
from tests.groups import all_ranks


def test_one_rank_copies_only_what_lies_elsewhere() -> None:
    def body(rank: int) -> None:
        collectives = all_ranks()
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


@pytest.mark.parametrize("backend", ["in_process", "gloo"])  # c10d's own way, and the exchange
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [6, 40_000])
def test_an_all_reduce_into_an_output_leaves_its_input(
    backend: str, dtype: torch.dtype, numel: int
) -> None:
    def body(rank: int) -> None:
        collectives = all_ranks(backend)
        source = torch.full((2, numel // 2), rank + 1, dtype=dtype)
        output = torch.empty_like(source)
        collectives.all_reduce(source, output=output)
        assert torch.equal(output, torch.full_like(output, 6))
        assert torch.equal(source, torch.full_like(source, rank + 1))
        with pytest.raises(LayoutError, match=f"rank {rank}: got an output of shape"):
            collectives.all_reduce(source, output=output.view(-1))

    run_ranks(body, 3)


def test_a_widened_reduction_counts_the_bytes_on_the_wire() -> None:
    def body(rank: int) -> dict[str, int]:
        collectives = all_ranks()
        half = torch.ones(8, dtype=torch.bfloat16)
        collectives.reduce_scatter(torch.empty(4, dtype=torch.bfloat16), half)
        same = collectives.traffic.total_bytes
        collectives.reduce_scatter(torch.empty(4), half)
        return {"same": same, "widened": collectives.traffic.total_bytes - same}

    assert run_ranks(body, 2) == [{"same": 8, "widened": 16}] * 2


def test_traffic_of_every_group_of_a_rank() -> None:
    def body(rank: int) -> list[tuple[tuple[int, ...], dict[str, int]]]:
        dp = all_ranks()
        pair = Collectives(dist.new_group([0, 1]))
        dp.all_reduce(torch.ones(4))
        duplicate = dp.duplicate()
        duplicate.all_reduce(torch.ones(4))
        also = Collectives(dp.group)
        also.barrier()
        if rank == 0:
            pair.send(torch.ones(2), 1)
        else:
            pair.recv(torch.ones(2), 0)
        return [
            (one.ranks, {name: traffic.calls for name, traffic in one.traffic.items()})
            for one in Collectives.traffic_by_group()
        ]

    both = ((0, 1), {"all_reduce": 2, "barrier": 1})
    assert run_ranks(body, 2) == [[both, ((0, 1), {name: 1})] for name in ("send", "recv")]


def test_groups_that_have_ended_leave_the_ledger() -> None:
    def body(rank: int) -> None:
        kept = all_ranks()
        for _ in range(3):
            all_ranks().barrier()  # dropped at once
        destroyed = Collectives(dist.new_group([0, 1]))
        destroyed.barrier()
        dist.destroy_process_group(destroyed.group)
        kept.all_reduce(torch.ones(1))
        gc.collect()
        assert [list(one.traffic) for one in Collectives.traffic_by_group()] == [["all_reduce"]]
        assert destroyed.traffic["barrier"].calls == 1

    gc.collect()
    others = set(Collectives._alive)  # an earlier test's, that a kept error still holds
    run_ranks(body, 2)
    gc.collect()
    assert Collectives.traffic_by_group() == []
    assert set(Collectives._alive) <= others


def test_waiting_is_told_from_starting() -> None:
    def body(rank: int) -> None:
        collectives = all_ranks()
        pending = collectives.all_reduce(torch.ones(2), async_op=True)
        assert collectives.traffic["all_reduce"].seconds > 0
        assert collectives.traffic["all_reduce"].seconds_waited == 0
        pending.wait()
        collectives.barrier()
        for one in collectives.traffic.values():
            assert 0 < one.seconds_waited <= one.seconds

    run_ranks(body, 2)


def test_a_dropped_peer_is_an_error() -> None:
    def body(rank: int) -> None:
        collectives = all_ranks()
        collectives.barrier()
        calls: list[Callable[[], object]] = [
            lambda: collectives.all_reduce(torch.ones(2)),
            lambda: collectives.all_gather(torch.ones(4), torch.ones(2)),
        ]
        for call in calls:
            with pytest.raises(RankFailedError):
                call()

    run_ranks(body, 2, faults=[Fault(rank=1, at_collective=2, kind="drop")])
