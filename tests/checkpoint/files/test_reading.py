"""A damaged file is told by name, whatever is damaged, and never loads as something else."""

import random
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from lightning_shard.checkpoint.files.reading import DamagedError, check_archive, read_file
from lightning_shard.checkpoint.files.torch_archive import records_of, write_archive
from lightning_shard.errors import CheckpointError, CheckpointNotFoundError
from tests.checkpoint.files.archives import checkpoint, damage, same
from tests.checkpoint.files.test_torch_archive import Plain


def ours(path: Path, content: Any) -> Path:
    with path.open("wb") as file:
        write_archive(file, records_of(content))
    return path


def theirs(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def told(path: Any, **options: Any) -> str:
    with pytest.raises(CheckpointError) as found:
        read_file(path, **options)
    return str(found.value)


def corrupt(path: Path, save: Any, seed: int, times: int) -> int:
    """Damage a file so many times; return how often it loaded all the same, with what it held."""
    content, rng = checkpoint(), random.Random(seed)
    whole = save(path, content).read_bytes()
    num_loaded = 0
    for _ in range(times):
        what, damaged = damage(whole, rng)
        path.write_bytes(damaged)
        try:
            loaded = read_file(path, "cpu", weights_only=rng.choice([True, False]))
        except CheckpointError:
            continue
        assert same(loaded, content), what
        num_loaded += 1
    return num_loaded


@pytest.mark.parametrize("save", [ours, theirs])
def test_damaged_files_load_nothing_else(tmp_path: Path, save: Any) -> None:
    assert corrupt(tmp_path / "last.ckpt", save, seed=0, times=150) < 100


@pytest.mark.slow
@pytest.mark.parametrize("save", [ours, theirs])
def test_two_thousand_damaged_files_load_nothing_else(tmp_path: Path, save: Any) -> None:
    assert corrupt(tmp_path / "last.ckpt", save, seed=1, times=2000) < 1000


@pytest.mark.slow
@pytest.mark.parametrize("save", [ours, theirs])
def test_each_bit_counts(tmp_path: Path, save: Any) -> None:
    content = {"weight": torch.arange(3.0), "step": torch.tensor(7.0)}
    path = save(tmp_path / "last.ckpt", content)
    whole = path.read_bytes()
    for place, bit in product(range(len(whole)), range(8)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        try:
            assert same(read_file(path), content), (place, bit)
        except CheckpointError:
            continue


@pytest.mark.slow
def test_no_range_of_zeros_makes_a_record_empty(tmp_path: Path) -> None:
    content = {"step": torch.tensor(7.0), "other": torch.tensor(8.0)}
    path = ours(tmp_path / "last.ckpt", content)
    whole = path.read_bytes()
    for place in range(len(whole) - 12):
        path.write_bytes(whole[:place] + bytes(12) + whole[place + 12 :])
        try:
            assert same(read_file(path), content), place
        except CheckpointError:
            continue


def test_a_record_that_is_said_to_be_a_folder_is_refused(tmp_path: Path) -> None:
    """A record that is said to be a folder was read as zeros."""
    path = ours(tmp_path / "last.ckpt", {"weight": torch.arange(3.0)})
    whole = bytearray(path.read_bytes())
    entry = whole.rindex(b"PK\1\2", 0, whole.rindex(b"archive/data/0"))
    whole[entry + 38] |= 0x10
    path.write_bytes(whole)
    assert "the archive's list says that it is no record" in told(path)


def test_the_tensor_is_named(tmp_path: Path) -> None:
    path = ours(tmp_path / "last.ckpt", checkpoint())
    whole, content = path.read_bytes(), checkpoint()
    for name, tensor in (
        ("state_dict.1.bias", content["state_dict"]["1.bias"]),
        (
            "optimizer_states.0.state.2.exp_avg",
            content["optimizer_states"][0]["state"][2]["exp_avg"],
        ),
    ):
        place = whole.index(tensor.detach().numpy().tobytes()) + 1
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        message = told(path)
        assert f"of {name!r}," in message
        assert "its checksum is" in message


def test_what_is_no_checkpoint_is_told_by_name(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: .*last.ckpt"):
        read_file(path)
    with pytest.raises(CheckpointNotFoundError):
        read_file(path)
    path.write_bytes(b"")
    assert "is empty" in told(path)
    path.write_text("epoch,loss\n")
    assert "is no checkpoint" in told(path)
    assert "is a folder" in told(tmp_path)
    whole = ours(path, checkpoint()).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert f"not complete, at {len(whole) // 2} bytes" in told(path)


def test_files_without_checksums_and_old_ones_load(tmp_path: Path) -> None:
    content, path = checkpoint(), tmp_path / "last.ckpt"
    for protocol in (2, 4):
        torch.save(content, path, _use_new_zipfile_serialization=False, pickle_protocol=protocol)
        assert same(read_file(path, weights_only=False), content)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(content, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(read_file(path), content)


def test_objects_load_where_they_are_asked_for(tmp_path: Path) -> None:
    content = {"state_dict": {}, "hyper_parameters": {"plain": Plain()}}
    path = ours(tmp_path / "last.ckpt", content)
    assert read_file(path, weights_only=False)["hyper_parameters"]["plain"] == Plain()
    for choice in (True, None):  # which is torch's default
        message = told(path, weights_only=choice)
        assert f"holds objects of {Plain.__module__}.Plain" in message
        assert "weights_only=False" in message


def test_a_class_that_is_not_there_is_told_by_name(tmp_path: Path) -> None:
    path = ours(tmp_path / "last.ckpt", {"plain": Plain()})
    records = [
        one._replace(content=one.content.replace(b"\nPlain", b"\nGone!"))
        if one.name == "data.pkl"
        else one
        for one in records_of({"plain": Plain()})
    ]
    with path.open("wb") as file:
        write_archive(file, records)
    assert "Can't get attribute 'Gone!'" in told(path, weights_only=False)


def test_a_remote_file_is_verified_like_any_other(tmp_path: Path) -> None:
    whole = ours(tmp_path / "last.ckpt", checkpoint()).read_bytes()
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe("/last.ckpt", whole)
    assert same(read_file("memory://last.ckpt"), checkpoint())
    filesystem.pipe("/last.ckpt", whole[:-1])
    assert "memory://last.ckpt is damaged" in told("memory://last.ckpt")
    filesystem.rm("/last.ckpt")
    with pytest.raises(FileNotFoundError, match=r"memory://last.ckpt"):
        read_file("memory://last.ckpt")


def test_a_packed_archive_is_unpacked_and_compared(tmp_path: Path) -> None:
    path, packed = ours(tmp_path / "last.ckpt", checkpoint()), tmp_path / "packed.ckpt"
    with zipfile.ZipFile(path) as one, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as other:
        for name in one.namelist():
            other.writestr(name, one.read(name))
    with packed.open("rb") as file:
        check_archive(file)


def test_an_archive_begins_at_its_first_byte(tmp_path: Path) -> None:
    """Python's zipfile passes over what stands before the first record."""
    torch.save({"weight": torch.ones(4)}, tmp_path / "whole.pt")
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(b"before" + (tmp_path / "whole.pt").read_bytes())
    with damaged.open("rb") as file, pytest.raises(DamagedError, match="at byte 6, expected 0"):
        check_archive(file)
