"""Which way an all-reduce goes, to every peer or round the ring; receive buffers are used again."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends.exchange import ExchangeCollectives, ScratchPool
from lightning_shard.backends.traffic import ring_share
from lightning_shard.testing import Expected, assert_traffic, run_ranks

LARGE = 40_000  # elements of two bytes: more than goes directly on any number of ranks
SMALL = 1_000


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "numel", "messages", "wire_dtype"),
    [
        (2, torch.float32, SMALL, 1, torch.float32),
        (2, torch.float32, LARGE, 0, torch.float32),  # as much, of middling size
        (2, torch.float32, 40 * LARGE, 1, torch.float32),
        (3, torch.float32, LARGE, 0, torch.float32),
        (3, torch.float32, SMALL, 2, torch.float32),
        (2, torch.bfloat16, LARGE, 1, torch.bfloat16),
        (3, torch.bfloat16, LARGE, 2, torch.bfloat16),  # two halves sent, for 4/3 of 32 bits
        (4, torch.bfloat16, LARGE, 0, torch.float32),  # the ring sums in the type that it sends
        (4, torch.bfloat16, SMALL, 3, torch.bfloat16),
    ],
)
def test_all_reduce_takes_the_cheaper_way(
    num_ranks: int, dtype: torch.dtype, numel: int, messages: int, wire_dtype: torch.dtype
) -> None:
    def body(rank: int) -> int:
        assert dist.group.WORLD is not None
        collectives = Counting(dist.group.WORLD)
        share = ring_share(2 * numel, num_ranks)
        expected = Expected(calls=1, elements=share, bytes=share * wire_dtype.itemsize)
        tensor = torch.ones(numel, dtype=dtype)
        with assert_traffic(collectives, all_reduce=expected):
            collectives.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((numel,), num_ranks, dtype=dtype))
        return collectives.messages

    assert run_ranks(body, num_ranks) == [messages] * num_ranks


def test_all_to_all_sends_each_peer_its_part_and_nothing_where_that_is_empty() -> None:
    def body(rank: int) -> int:
        assert dist.group.WORLD is not None
        collectives = Counting(dist.group.WORLD)
        splits = [2 if (rank + peer) % 2 else 0 for peer in range(3)]  # alike there and back
        source = torch.arange(sum(splits)) + 10.0 * rank
        output = torch.empty(sum(splits))
        collectives.all_to_all(output, source, input_split_sizes=splits, output_split_sizes=splits)
        from_peers = {0: [10.0, 11.0], 1: [0.0, 1.0, 20.0, 21.0], 2: [12.0, 13.0]}
        assert output.tolist() == from_peers[rank]
        return collectives.messages

    assert run_ranks(body, 3) == [1, 2, 1]


class Counting(ExchangeCollectives):
    """Counts the messages that this rank sends; it receives as many."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.messages = 0

    def _exchange(self, *tensors: Sequence[torch.Tensor]) -> list[dist.Work]:
        works = super()._exchange(*tensors)
        self.messages += len(works) // 2
        return works


def test_a_buffer_is_used_again() -> None:
    pool = ScratchPool(smallest_bytes=0)
    first = pool.lend(100)
    pool.give_back(first)
    assert pool.lend(60) is first
    assert pool.idle_bytes == 0


def test_a_lent_buffer_is_not_lent_twice() -> None:
    pool = ScratchPool(smallest_bytes=0)
    assert pool.lend(100) is not pool.lend(100)


def test_the_smallest_that_fits_is_lent() -> None:
    pool = ScratchPool(smallest_bytes=0)
    small, large = pool.lend(100), pool.lend(300)
    pool.give_back(large)
    pool.give_back(small)
    assert pool.lend(90) is small
    assert pool.lend(90) is large


def test_a_buffer_much_too_large_is_left_for_others() -> None:
    pool = ScratchPool(smallest_bytes=0)
    pool.give_back(pool.lend(1000))
    assert pool.lend(200).numel() == 200
    assert pool.idle_bytes == 1000


def test_idle_bytes_stay_below_the_limit() -> None:
    pool = ScratchPool(smallest_bytes=0, idle_limit_bytes=500)
    buffers = [pool.lend(num_bytes) for num_bytes in (100, 200, 300, 600)]
    for buffer in buffers:
        pool.give_back(buffer)
    assert pool.idle_bytes == 500
    assert pool.lend(300) is buffers[2]


def test_the_buffers_of_buckets_are_not_held_between_steps() -> None:
    """The buffers of buckets were held between steps."""
    pool = ScratchPool()
    pool.give_back(pool.lend(25 << 20))
    assert pool.idle_bytes == 0
    pool.give_back(pool.lend(33 << 20))
    assert pool.idle_bytes == 33 << 20
