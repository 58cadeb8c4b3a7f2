"""A rank's saves without any strategy: complete, joined, removed, given up; copies of a moment."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from lightning_shard.checkpoint.background_saves import (
    BackgroundSaves,
    SaveCancelledError,
    SaveInFlight,
    StagedItems,
)
from lightning_shard.checkpoint.host_buffers import HostBuffers
from tests.checkpoint.saved_sections import is_sharded_folder

STATE: dict[str, Any] = {"state_dict": {"weight": torch.arange(6.0)}}


@pytest.fixture
def saves() -> BackgroundSaves:
    made = BackgroundSaves()
    made.open(torch.device("cpu"), shows_progress=False)
    return made


def test_without_a_step_a_save_is_complete_at_once(saves: BackgroundSaves, tmp_path: Path) -> None:
    saves.write(tmp_path / "now", STATE, {}, None, step=None)
    assert is_sharded_folder(tmp_path / "now")
    saves.close()
    saves.write(tmp_path / "closed", STATE, {}, None, step=1)
    saves.start()
    assert is_sharded_folder(tmp_path / "closed")


def test_one_of_the_same_step_comes_along(saves: BackgroundSaves, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("one", "last", "next")]
    saves.write(paths[0], STATE, {}, None, step=1)
    saves.start()
    saves.write(paths[1], STATE, {}, None, step=1)
    saves.start()
    assert [saves.will_exist(path, False) for path in paths] == [True, True, False]
    saves.write(paths[2], STATE, {}, None, step=2)  # waits for those before
    saves.start()
    assert all(map(is_sharded_folder, paths[:2]))
    saves.finish()
    assert is_sharded_folder(paths[2])


def test_what_is_removed_stays_until_the_next_is_complete(
    saves: BackgroundSaves, tmp_path: Path
) -> None:
    removed = list[Path]()
    assert not saves.remove_later(tmp_path / "old", removed.append)
    saves.write(tmp_path / "new", STATE, {}, None, step=1)
    saves.start()
    assert saves.remove_later(tmp_path / "old", removed.append)
    assert not saves.will_exist(str(tmp_path / "old"), True)
    saves.finish()
    assert removed == [tmp_path / "old"]


def test_a_rank_that_fails_alone_gives_the_save_up(
    saves: BackgroundSaves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SaveInFlight, "progress", 0)
    saves.write(tmp_path / "given up", STATE, {}, None, step=1)
    saves.start()
    saves.advance()
    error = ValueError("in a step")
    saves.end(error, is_common=False)
    assert "given up was still being written" in error.__notes__[0]
    assert not list(tmp_path.iterdir())
    saves.write(tmp_path / "after", STATE, {}, None, step=1)  # callbacks hear of the error
    saves.start()
    assert is_sharded_folder(tmp_path / "after")


ENTRIES: dict[str, Any] = {
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
        key: value.clone() if isinstance(value, Tensor) else value for key, value in ENTRIES.items()
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
        found, expected = staged.resolve_data(item), ENTRIES[item.index.fqn]
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
