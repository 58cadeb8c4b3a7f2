"""What an optimizer keeps, as another rank can rebuild it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from lightning_shard.checkpoint.rank_snapshot import (
    CommonValue,
    Entries,
    Scalar,
    ShardMark,
    describe,
    merge,
    rebuild,
)
from lightning_shard.testing import run_ranks
from tests.elastic.engines import Setting, attach, start


def described(state: dict[str, Any]) -> Entries:
    def fn(_: int) -> Entries:
        model = nn.Linear(2, 3, bias=False)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        rank = attach(Setting(stage=1), model, optimizer)
        optimizer.state[model.weight] = state
        entries = describe(optimizer, rank.engine)[0]
        assert entries is not None
        return entries

    result = run_ranks(fn, 1)[0]
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.zeros(6), ShardMark(torch.float32)),
        (torch.zeros(6, dtype=torch.bfloat16), ShardMark(torch.bfloat16)),
        (torch.tensor(3.0), Scalar(3.0, torch.float32, on_device=False)),
        (torch.tensor(3), Scalar(3, torch.int64, on_device=False)),
        (True, CommonValue(True, on_device=False)),
        (None, CommonValue(None, on_device=False)),
    ],
)
def test_kinds(value: Any, expected: object) -> None:
    assert described({"key": value}) == (("key", expected),)


def test_keys_keep_their_order() -> None:
    entries = described({"step": torch.tensor(1.0), "b": torch.ones(6), "a": torch.ones(6)})
    assert [key for key, _ in entries] == ["step", "b", "a"]


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(0.1),
        torch.tensor(-0.0),
        torch.tensor(1 / 3, dtype=torch.bfloat16),
        torch.tensor(2**53 + 1),
        torch.tensor(1 / 3, dtype=torch.float64),
        torch.tensor(1 + 2j),
        torch.tensor([1.0, 2.0]),  # of all elements together
    ],
)
def test_tensors_come_back_as_they_were(value: Tensor) -> None:
    ((_, entry),) = described({"key": value})
    assert not isinstance(entry, ShardMark)
    back = rebuild(entry, nn.Parameter(torch.ones(1)))
    assert (back.dtype, back.shape) == (value.dtype, value.shape)
    assert torch.equal(back, value)
    assert back.ndim or str(back) == str(value)  # the sign of zero
    assert back is not value


def test_a_rank_without_elements_of_a_parameter_says_nothing() -> None:
    def fn(_: int) -> list[bool]:
        rank = start(Setting(stage=1))
        rank.train(0, 1)
        for param in rank.model.parameters():
            rank.optimizer.state[param].setdefault("step", torch.tensor(99.0))  # stale
        return [entries is not None for entries in describe(rank.optimizer, rank.engine)]

    said = [one for one in run_ranks(fn, 5) if one is not None]
    assert all(any(of_param) for of_param in zip(*said, strict=True))
    assert not all(all(of_param) for of_param in zip(*said, strict=True))


def test_the_first_who_knows_speaks() -> None:
    one = (("step", Scalar(1.0, torch.float32, on_device=False)),)
    two = (("step", Scalar(2.0, torch.float32, on_device=False)),)
    assert merge([[None, one, None], [two, two, None]]) == [two, one, None]
