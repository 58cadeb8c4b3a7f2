"""Tensors between ranks: any number of any type, their metadata told once."""

import pytest
import torch
from torch import Tensor

from lightning_shard import ConfigError
from lightning_shard.backends.collectives import Collectives
from lightning_shard.pipeline_parallel.messages import StageMessages, TensorMetadata
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

CPU = torch.device("cpu")


def pair() -> tuple[Collectives, StageMessages]:
    collectives = all_ranks()
    return collectives, StageMessages(collectives, CPU)


def tensors(size: int) -> list[Tensor]:
    return [
        torch.arange(size * 3.0).view(size, 3).requires_grad_(),
        torch.arange(size) > 1,
        torch.tensor(size),
        torch.empty(0, size, dtype=torch.bfloat16),
        torch.ones(3, size, dtype=torch.complex64).T,
    ]


def sent_and_received(sizes: list[int]) -> tuple[list[list[Tensor]], int]:
    """Send tensors of these sizes, one microbatch each; return those and the number of messages."""

    def work(rank: int) -> tuple[list[list[Tensor]], int]:
        collectives, messages = pair()
        got = []
        for tag, size in enumerate(sizes):
            if rank == 0:
                messages.send(messages.described(tensors(size), size), 1, tag)
            else:
                got.append(messages.receive(0, tag, key=size).wait())
        messages.finish()
        return got, collectives.traffic["send"].calls

    (_, num_messages), (got, _) = run_ranks(work, 2)
    return got, num_messages


def test_tensors_arrive_as_they_were() -> None:
    got, _ = sent_and_received([2, 4, 2])
    for size, received in zip([2, 4, 2], got, strict=True):
        for one, expected in zip(received, tensors(size), strict=True):
            assert one.dtype == expected.dtype
            assert one.requires_grad == expected.requires_grad
            assert torch.equal(one, expected)


def test_looks_are_told_once_for_each_shape() -> None:
    assert sent_and_received([2, 2, 2])[1] == 1 + 3 * 4  # a header; nothing is empty but one
    assert sent_and_received([2, 4, 2])[1] == 2 + 3 * 4


def test_receives_may_be_posted_before_their_looks_are_known() -> None:
    def work(rank: int) -> list[Tensor]:
        _, messages = pair()
        if rank == 0:
            for tag in range(3):
                messages.send(messages.described([torch.full((2,), float(tag))], "same"), 1, tag)
            messages.finish()
            return []
        handles = [messages.receive(0, tag, key="same") for tag in range(3)]
        return [handle.wait()[0] for handle in handles]

    got = run_ranks(work, 2)[1]
    assert [one.tolist() for one in got] == [[0, 0], [1, 1], [2, 2]]


def test_other_looks_under_the_same_key_are_refused() -> None:
    def work(rank: int) -> None:
        _, messages = pair()
        if rank == 0:
            messages.send(messages.described([torch.ones(2)], "k"), 1, 0)
            messages.send(messages.described([torch.ones(3)], "k"), 1, 1)
        else:
            messages.receive(0, 0, key="k").wait()
            messages.receive(0, 1, key="k").wait()

    with pytest.raises(ConfigError, match="as for the last batch of these shapes"):
        run_ranks(work, 2)


def test_too_many_tensors_for_a_header() -> None:
    def work(rank: int) -> None:
        _, messages = pair()
        messages.send(messages.described([torch.ones(1)] * 100, "k"), 1 - rank, 0)

    with pytest.raises(ConfigError, match="100 tensors between two stages are too many"):
        run_ranks(work, 2)


def test_no_gradient_is_expected_where_none_is_followed() -> None:
    tensor = torch.ones(2, requires_grad=True)
    assert TensorMetadata.of(tensor).requires_grad
    with torch.no_grad():
        assert not TensorMetadata.of(tensor).requires_grad
