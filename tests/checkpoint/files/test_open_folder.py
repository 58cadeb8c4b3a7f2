"""A file that goes to the disk while it is written has the bytes that were written, or fails."""

import errno
import os
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_shard.checkpoint.files import open_folder
from lightning_shard.checkpoint.files.new import new_file
from lightning_shard.checkpoint.files.open_folder import DiskFile
from lightning_shard.errors import CheckpointError

SMALL = 8192  # a buffer, so that little goes through many


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_folder, "BUFFER_BYTES", SMALL)


@pytest.fixture(params=["direct", "ordinary"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write past the page cache where this filesystem can, or the ordinary way."""
    if request.param == "ordinary":
        monkeypatch.setattr(open_folder, "_DIRECT", 0)
    return str(request.param)


def content(num_bytes: int) -> bytes:
    return np.random.default_rng(num_bytes).bytes(num_bytes)


def chunks(data: bytes) -> Iterator[bytes]:
    """Cut into parts that are shorter and longer than a buffer, and one of nothing."""
    sizes, at = [1, 0, 5, 4096, 3 * SMALL, SMALL - 7, 7 * SMALL + 3], 0
    while at < len(data):
        size = sizes.pop(0)
        sizes.append(size)
        yield data[at : at + size]
        at += size


@pytest.mark.parametrize("num_bytes", [0, 1, SMALL - 1, SMALL, SMALL + 1, 3 * SMALL, 500_001])
def test_it_has_what_was_written(tmp_path: Path, num_bytes: int, way: str) -> None:
    data, place = content(num_bytes), tmp_path / "one"
    with closing(DiskFile(place)) as file:
        for chunk in chunks(data):
            assert file.write(chunk) == len(chunk)
        assert file.tell() == num_bytes
        file.finish()
    assert place.read_bytes() == data


def test_elements_of_tensors_are_written_as_bytes(tmp_path: Path) -> None:
    values = torch.arange(3 * SMALL, dtype=torch.float64)
    with closing(DiskFile(tmp_path / "one")) as file:
        file.write(memoryview(torch.empty(0, 3).numpy()))
        file.write(memoryview(values.numpy()))
        file.finish()
    assert (tmp_path / "one").read_bytes() == values.numpy().tobytes()


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("first")
    with pytest.raises(FileExistsError):
        DiskFile(tmp_path / "one")
    assert (tmp_path / "one").read_text() == "first"


@pytest.mark.parametrize("most", [1, 100, 4096])
def test_writes_that_the_system_cuts_short_are_gone_on_with(
    tmp_path: Path, way: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, part, at: real(fd, part[:most], at))
    data = content(3 * SMALL + 5)
    with closing(DiskFile(tmp_path / "one")) as file:
        file.write(data)
        file.finish()
    assert (tmp_path / "one").read_bytes() == data


def test_a_filesystem_that_refuses_direct_writes_late_gets_ordinary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def refusing(descriptor: int, part: Any, at: int) -> int:
        if open_folder._is_direct(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, part, at)

    monkeypatch.setattr(os, "pwrite", refusing)
    data = content(5 * SMALL)
    with closing(DiskFile(tmp_path / "one")) as file:
        file.write(data)
        file.finish()
    assert (tmp_path / "one").read_bytes() == data


@pytest.mark.parametrize("full_from", [0, SMALL, 4 * SMALL])
def test_a_full_disk_is_told_whoever_hides_it(
    tmp_path: Path, way: str, full_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def full(descriptor: int, part: Any, at: int) -> int:
        if at >= full_from:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, part, at)

    monkeypatch.setattr(os, "pwrite", full)

    def save() -> None:
        with new_file(tmp_path / "one") as file:
            for _ in range(6):
                with suppress(OSError):  # as torch might
                    file.write(content(SMALL))

    with pytest.raises(CheckpointError, match="No space left on device"):
        save()
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_last_flush_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)

    def save() -> None:
        with new_file(tmp_path / "one") as file:
            file.write(b"a")

    with pytest.raises(CheckpointError, match="Input/output error"):
        save()
    assert not list(tmp_path.iterdir())


def test_no_more_is_held_than_the_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = open_folder.mmap

    def counted(*args: Any, **options: Any) -> Any:
        made.append(args[1])
        return real(*args, **options)

    monkeypatch.setattr(open_folder, "mmap", counted)
    with closing(DiskFile(tmp_path / "one")) as file:
        file.write(content(50 * SMALL))
        file.finish()
    assert made == [SMALL] * open_folder.NUM_BUFFERS
