"""The host memory that snapshots lie in."""

import torch

from lightning_shard.checkpoint.host_buffers import SPARE_BYTES, HostBuffers, take_fitting


def sizes(*numbers: int) -> list[torch.Tensor]:
    return [torch.empty(number, dtype=torch.uint8) for number in numbers]


def test_a_buffer_that_came_back_serves_a_slightly_larger_snapshot() -> None:
    buffers = HostBuffers()
    first = buffers.lend(1000)
    assert first.shape == (1000,)
    buffers.give_back(first)
    assert buffers.lend(1500).data_ptr() == first.data_ptr()


def test_a_lent_buffer_is_not_lent_again() -> None:
    buffers = HostBuffers()
    assert buffers.lend(1000).data_ptr() != buffers.lend(1000).data_ptr()


def test_buffers_that_are_far_too_large_are_freed() -> None:
    buffers = HostBuffers()
    large = buffers.lend(10 * SPARE_BYTES)
    buffers.give_back(large)
    small = buffers.lend(10)
    buffers.give_back(small)
    assert buffers.lend(10 * SPARE_BYTES).numel() == 10 * SPARE_BYTES


def test_the_smallest_that_fits_is_taken() -> None:
    idle = sizes(50, 400_000, 300_000, 200_000)
    found = take_fitting(idle, 150_000)
    assert found is not None
    assert found.numel() == 200_000
    assert [one.numel() for one in idle] == [50, 400_000, 300_000]


def test_none_fits() -> None:
    idle = sizes(50, 10_000_000)
    assert take_fitting(idle, 1000) is None
    assert len(idle) == 2
