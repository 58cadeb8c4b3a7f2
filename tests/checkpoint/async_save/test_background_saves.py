"""A rank's saves without any strategy: when they are complete, joined, removed and given up."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shard.checkpoint.async_save.background_saves import BackgroundSaves, SaveInFlight
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
