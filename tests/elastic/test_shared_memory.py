"""Snapshots that outlive the processes that took them, and the memory that they lie in."""

import os
import re
import signal
import stat
from pathlib import Path

import pytest
import torch

from lightning_shard.checkpoint.host_buffers import SPARE_BYTES, HostBuffers, take_fitting
from lightning_shard.checkpoint.rank_snapshot import Snapshot
from lightning_shard.elastic.membership.ranks import (
    SharedMemoryBuffers,
    clear,
    job_folder,
    load_all,
    remove_orphans,
)
from lightning_shard.errors import CheckpointError, ConfigError
from lightning_shard.testing import run_ranks
from tests.elastic.engines import Setting, start
from tests.processes import calling_command, run_alone, run_commands


def take_steps(folder: Path, num_ranks: int, *steps: int, generation: int = 0) -> list[Snapshot]:
    def fn(index: int) -> list[Snapshot]:
        rank = start(Setting(stage=2))
        buffers = SharedMemoryBuffers(folder, f"rank{index}", generation)
        return [rank.snapshot(step, buffers=buffers) for step in steps]

    return [one for of_rank in run_ranks(fn, num_ranks) for one in of_rank or ()]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_taken_is_loaded(tmp_path: Path) -> None:
    taken = take_steps(tmp_path, 2, 10, 20)
    loaded = load_all(tmp_path)
    assert len(loaded) == 4
    for one, other in zip(taken, loaded, strict=True):
        assert torch.equal(one.data, other.data)
        assert one.metadata == other.metadata


def test_a_buffer_is_found_only_while_it_holds_a_full_snapshot(tmp_path: Path) -> None:
    buffers = SharedMemoryBuffers(tmp_path, "rank0", 3)

    def fn(_: int) -> Snapshot:
        return start(Setting(stage=1)).snapshot(1, buffers=buffers)

    (snapshot,) = run_ranks(fn, 1)
    assert snapshot is not None
    assert files(tmp_path) == ["000003-rank0-0.snapshot"]
    buffers.give_back(snapshot.data)
    assert files(tmp_path) == ["000003-rank0-0.open"]
    again = buffers.lend(snapshot.data.numel())
    assert again.data_ptr() == snapshot.data.data_ptr()
    assert load_all(tmp_path) == []
    buffers.keep(again)
    assert [one.metadata.step for one in load_all(tmp_path)] == [1]


def test_what_is_loaded_stays_readable_and_is_a_copy_on_write(tmp_path: Path) -> None:
    take_steps(tmp_path, 1, 10)
    (loaded,) = load_all(tmp_path)
    expected = loaded.data.clone()
    loaded.data.add_(1)
    assert torch.equal(load_all(tmp_path)[0].data, expected)
    clear(tmp_path)
    assert torch.equal(loaded.data, expected + 1)


def test_a_buffer_that_does_not_come_back(tmp_path: Path) -> None:
    buffers = SharedMemoryBuffers(tmp_path, "rank0")
    data = buffers.lend(100)
    buffers.forget(data)
    assert files(tmp_path) == []
    data.fill_(1)


def test_a_buffer_from_elsewhere_is_passed_over(tmp_path: Path) -> None:
    SharedMemoryBuffers(tmp_path, "rank0").give_back(torch.zeros(10, dtype=torch.uint8))
    assert files(tmp_path) == []


def test_buffers_of_another_size_go(tmp_path: Path) -> None:
    buffers = SharedMemoryBuffers(tmp_path, "rank0")
    small = buffers.lend(100)
    buffers.keep(small)
    buffers.give_back(small)
    buffers.lend(10 * SPARE_BYTES)
    assert files(tmp_path) == ["000000-rank0-1.open"]


def test_clear_leaves_later_generations(tmp_path: Path) -> None:
    take_steps(tmp_path, 1, 10, generation=1)
    SharedMemoryBuffers(tmp_path, "rank1", 1).lend(10)
    take_steps(tmp_path, 1, 20, generation=2)
    clear(tmp_path, before=2)
    assert files(tmp_path) == ["000002-rank0-0.snapshot"]
    clear(tmp_path)
    assert not tmp_path.exists()


def test_clear_leaves_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    clear(tmp_path)
    assert files(tmp_path) == ["notes.txt"]


def test_the_folder_is_ones_own(tmp_path: Path) -> None:
    folder = job_folder("job/7 of me", tmp_path)
    assert folder.name == f"lightning_shard-{os.getuid()}-job_7_of_me"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert job_folder("job/7 of me", tmp_path) == folder


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    job_folder("open", tmp_path).chmod(0o755)
    with pytest.raises(ConfigError, match=r"got drwxr-xr-x of user .* alone may enter"):
        job_folder("open", tmp_path)


def test_a_link_to_another_folder_is_refused(tmp_path: Path) -> None:
    is_on_other_ranks = tmp_path / "elsewhere"
    is_on_other_ranks.mkdir(mode=0o700)
    (tmp_path / f"lightning_shard-{os.getuid()}-job").symlink_to(is_on_other_ranks)
    with pytest.raises(ConfigError, match="got lrwxrwxrwx"):
        job_folder("job", tmp_path)


def test_no_shared_memory_here(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Give another folder"):
        job_folder("job", tmp_path / "missing")


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match=re.escape("No room for a snapshot of")):
        SharedMemoryBuffers(tmp_path, "rank0").lend(100)
    assert files(tmp_path) == []


def be_killed_while_writing(folder: str) -> None:
    def fn(_: int) -> None:
        rank = start(Setting(stage=2))
        rank.train(0, 1)
        buffers = SharedMemoryBuffers(Path(folder), "rank0", 1)
        old = rank.snapshot(10, buffers=buffers)
        rank.snapshot(20, buffers=buffers)
        buffers.give_back(old.data)
        buffers.lend(old.data.numel())[:1000].fill_(255)
        os.kill(os.getpid(), signal.SIGKILL)

    run_ranks(fn, 1)


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_what_was_full(tmp_path: Path) -> None:
    snapshots, call = tmp_path / "snapshots", tmp_path / "call"
    snapshots.mkdir()
    call.mkdir()
    command = calling_command(str(call), be_killed_while_writing, {"folder": str(snapshots)})
    (finished,) = run_commands([command], timeout_seconds=60)
    assert finished.returncode == -signal.SIGKILL, finished.output
    assert files(snapshots) == ["000001-rank0-0.open", "000001-rank0-1.snapshot"]
    assert [one.metadata.step for one in load_all(snapshots)] == [20]


def test_what_a_job_has_left_whose_agent_is_gone_is_removed(tmp_path: Path) -> None:
    ended = run_alone("-c", "import os; print(os.getpid())").output.strip()
    orphan, mine = (job_folder(f"job-{pid}", tmp_path) for pid in (ended, os.getpid()))
    for folder in (orphan, mine):
        (folder / "000001-rank0-0.snapshot").touch()
    remove_orphans(tmp_path)
    assert not orphan.exists()
    assert mine.exists()


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
