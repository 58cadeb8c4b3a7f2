"""Receive buffers that are used again."""

from lightning_shard.backends.scratch import ScratchPool


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


def test_the_buffers_of_buckets_were_held_between_steps() -> None:
    pool = ScratchPool()
    pool.give_back(pool.lend(25 << 20))
    assert pool.idle_bytes == 0
    pool.give_back(pool.lend(33 << 20))
    assert pool.idle_bytes == 33 << 20
