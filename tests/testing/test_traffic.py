"""assert_traffic: what it lets pass, and what its error says."""

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.traffic import OPERATIONS
from lightning_shard.errors import ConfigError
from lightning_shard.testing import Expected, assert_traffic, run_ranks


def world() -> Collectives:
    assert dist.group.WORLD is not None
    return Collectives(dist.group.WORLD)


def test_expected_traffic_passes() -> None:
    def body(rank: int) -> None:
        collectives = world()
        collectives.all_reduce(torch.ones(4))  # before the block: not counted
        with assert_traffic(
            collectives,
            allow=["barrier"],
            all_reduce=Expected(calls=2, elements=8, bytes=32),
            broadcast=Expected(bytes=12),
        ):
            for _ in range(2):
                collectives.all_reduce(torch.ones(4))
            collectives.duplicate().broadcast(torch.ones(3))
            collectives.barrier()
        with assert_traffic(collectives):
            pass

    run_ranks(body, 2)


def send_more_than_expected(collectives: Collectives) -> None:
    with assert_traffic(
        collectives,
        all_gather=Expected(calls=2, bytes=8),
        all_reduce=Expected(calls=1, bytes=4),
    ):
        collectives.all_gather(torch.ones(4), torch.ones(2))
        collectives.all_reduce(torch.ones(1000))
        collectives.barrier()


def test_the_error_lists_what_was_got_and_expected() -> None:
    def body(rank: int) -> str:
        with pytest.raises(AssertionError) as caught:
            send_more_than_expected(world())
        return str(caught.value)

    for rank, message in enumerate(run_ranks(body, 2)):
        assert message is not None
        head, *table = message.splitlines()
        assert head.startswith(f"Traffic on rank {rank} of 2, group ")
        assert table == [
            "operation   counter    got  expected",
            "all_gather  calls        1         2",
            "all_reduce  bytes    4,000         4",
            "barrier     calls        1         0",
        ]


def test_an_expected_operation_that_never_comes() -> None:
    def body(rank: int) -> None:
        with assert_traffic(world(), reduce_scatter=Expected(calls=1)):
            pass

    with pytest.raises(AssertionError, match=r"reduce_scatter +calls +0 +1"):
        run_ranks(body, 1)


def test_an_error_inside_comes_out_as_it_is() -> None:
    def body(rank: int) -> None:
        with assert_traffic(world(), all_reduce=Expected(calls=1)):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_ranks(body, 1)


def test_a_misspelt_operation_is_refused() -> None:
    def body(rank: int) -> None:
        with assert_traffic(world(), allgather=Expected(calls=0)):
            pass

    with pytest.raises(ConfigError, match="got allgather, expected names of operations"):
        run_ranks(body, 1)


def test_every_counted_operation_has_a_name_to_expect() -> None:
    def body(rank: int) -> set[str]:
        collectives = world()
        box = torch.zeros(2)
        collectives.all_reduce(box)
        collectives.reduce_scatter(torch.zeros(1), box)
        collectives.all_gather(box, torch.zeros(1))
        collectives.all_to_all(torch.zeros(2), box)
        collectives.broadcast(box)
        collectives.send(box, 1) if rank == 0 else collectives.recv(box, 0)
        collectives.barrier()
        collectives.all_gather_object(1)
        collectives.broadcast_object(1)
        return set(collectives.traffic)

    counted = run_ranks(body, 2)
    assert set().union(*(one or () for one in counted)) == set(OPERATIONS)
