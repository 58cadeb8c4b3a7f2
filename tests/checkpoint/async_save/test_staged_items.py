"""Copies of what a rank writes: of their moment, each with a storage of its own size, cancelled."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from lightning_shard.checkpoint.async_save.background_saves import SaveCancelledError, StagedItems
from lightning_shard.checkpoint.host_buffers import HostBuffers

STATE: dict[str, Any] = {
    "strided": torch.arange(12.0).view(3, 4).t(),
    "bf16": torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
    "flag": torch.tensor(True),
    "empty": torch.empty(0, 3),
    "value": {"lr": 0.1},
}


def planned(state: dict[str, Any]) -> tuple[list[Any], Any]:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(state, is_coordinator=True)
    return planner.create_local_plan().items, planner.resolve_data


def copied() -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in STATE.items()
    }


def test_copies_are_of_their_moment() -> None:
    state = copied()
    items, resolve = planned(state)
    staged = StagedItems(items, resolve, HostBuffers())
    assert staged.holds(items, resolve)
    for value in state.values():
        if isinstance(value, Tensor):
            value.zero_()
    assert not staged.holds(items, resolve)
    for item in items:
        found, expected = staged.resolve_data(item), STATE[item.index.fqn]
        if isinstance(expected, Tensor):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            assert found.untyped_storage().nbytes() == found.numel() * found.itemsize
        else:
            assert isinstance(found, io.BytesIO)
            assert torch.load(io.BytesIO(found.getvalue())) == expected
    assert staged.num_written == staged.num_bytes == 48 + 6 + 1


def test_another_entry_is_another_moment() -> None:
    items, resolve = planned(copied())
    staged = StagedItems(items, resolve, HostBuffers())
    assert not staged.holds(*planned({**copied(), "value": {"lr": 0.2}}))
    assert not staged.holds(*planned({**copied(), "more": torch.ones(1)}))
    assert not staged.holds(*planned({**copied(), "flag": torch.tensor(1, dtype=torch.uint8)}))


def test_a_cancelled_writer_ends_at_the_next_item() -> None:
    items, resolve = planned(copied())
    staged = StagedItems(items, resolve, HostBuffers())
    staged.cancelled.set()
    with pytest.raises(SaveCancelledError):
        staged.resolve_data(items[0])
