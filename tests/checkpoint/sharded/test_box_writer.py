"""Boxes go to the disk without a copy, as torch writes them, and their checksum comes along."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_shard.checkpoint.background_saves import write_folder
from lightning_shard.checkpoint.files import torch_archive
from lightning_shard.checkpoint.files.open_folder import checksum_of, read_checksums, verify_folder
from lightning_shard.checkpoint.files.torch_archive import parts_of
from lightning_shard.checkpoint.sharded.boxed_tensor import BoxedTensor
from lightning_shard.core.layout import Box
from lightning_shard.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MEMORY = torch.arange(240.0)


def boxed(tensor: Tensor) -> BoxedTensor:
    return BoxedTensor(
        tensor.shape, tensor.dtype, [(Box((0,) * tensor.ndim, tensor.shape), tensor)]
    )


CASES = {
    "part of a larger memory": MEMORY[7:31].view(4, 6),
    "columns": MEMORY.view(12, 20)[:, 3:9],
    "transposed": MEMORY.view(12, 20).T,
    "every other": MEMORY[::2],
    "repeated": torch.ones(1).expand(3, 4),
    "one number": torch.tensor(3),
    "empty": torch.empty(0, 5),
    "empty columns": MEMORY.view(12, 20)[:, 3:3],
    "half": MEMORY[:6].to(torch.bfloat16).view(2, 3),
    "complex": torch.complex(MEMORY[:4], MEMORY[4:8]),
    "conjugate": torch.complex(MEMORY[:4], MEMORY[4:8]).conj(),
    "truth": MEMORY[:6] > 2,
    "channels last": MEMORY.view(2, 3, 5, 8).to(memory_format=torch.channels_last),
    "a parameter": nn.Parameter(MEMORY[:4]),
}


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut what is copied in parts of a few numbers."""
    monkeypatch.setattr(torch_archive, "PART_BYTES", 64)


@pytest.mark.parametrize("case", CASES)
def test_the_parts_are_the_elements_in_order(case: str) -> None:
    tensor = CASES[case].detach().resolve_conj()
    expected = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert b"".join(parts_of(tensor)) == expected


def test_what_is_copied_is_copied_in_short_parts() -> None:
    columns = MEMORY.view(12, 20)[:, 3:9]
    assert max(part.nbytes for part in parts_of(columns)) <= 64
    assert max(part.nbytes for part in parts_of(MEMORY.view(2, 120)[:, ::2])) <= 64
    (alone,) = parts_of(MEMORY[20:40])
    assert torch.frombuffer(alone, dtype=torch.float32).data_ptr() == MEMORY[20:40].data_ptr()


@pytest.fixture
def state() -> dict[str, Any]:
    boxes = {name: boxed(one.detach()) for name, one in CASES.items()}
    return {"boxes": boxes, "tensors": dict(CASES), "values": {"text": "x" * 300, "list": [1, 2]}}


def test_torch_reads_a_folder_without_this_package(tmp_path: Path, state: dict[str, Any]) -> None:
    write_folder(tmp_path / "one", state, {}, None)
    read: dict[str, Any] = {
        "boxes": {name: torch.zeros_like(one.detach()) for name, one in CASES.items()},
        "tensors": {name: torch.zeros_like(one.detach()) for name, one in CASES.items()},
        "values": {"text": "", "list": [0, 0]},
    }
    dcp.load(read, checkpoint_id=tmp_path / "one", no_dist=True)
    for name, expected in CASES.items():
        for kind in ("boxes", "tensors"):
            torch.testing.assert_close(read[kind][name], expected.detach(), rtol=0, atol=0)
    assert read["values"] == state["values"]


def test_each_item_is_what_torch_saves(tmp_path: Path, state: dict[str, Any]) -> None:
    write_folder(tmp_path / "one", state, {}, None)
    index = FileSystemReader(tmp_path / "one").read_metadata()
    file = (tmp_path / "one" / "__0_0.distcp").read_bytes()
    end = 0
    for place, stored in index.storage_data.items():
        assert stored.offset == end
        end += stored.length
        item = tmp_path / "item"
        item.write_bytes(file[stored.offset : end])
        loaded = torch.load(item, weights_only=True)
        if place.fqn.startswith("boxes."):
            expected = CASES[place.fqn.removeprefix("boxes.")].detach()
            torch.testing.assert_close(loaded, expected, rtol=0, atol=0)
            assert type(loaded) is Tensor
            assert loaded.untyped_storage().nbytes() == loaded.nbytes
    assert end == len(file)


def test_checksums_are_those_of_the_files(tmp_path: Path, state: dict[str, Any]) -> None:
    write_folder(tmp_path / "one", state, {"epoch": 1}, None)
    known = read_checksums(tmp_path / "one")
    assert known is not None
    assert set(known) == {"__0_0.distcp", "meta.pt", ".metadata"}
    for name, told in known.items():
        assert told == checksum_of(tmp_path / "one" / name)
    damaged = tmp_path / "one" / "__0_0.distcp"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        verify_folder(tmp_path / "one")


@pytest.mark.parametrize("fails", ["pwrite", "fsync"])
def test_a_full_disk_fails_the_save_and_leaves_the_folder_before(
    tmp_path: Path, fails: str, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "one", {"a": torch.ones(2)}, {}, None)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, fails, full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            write_folder(tmp_path / "one", state, {}, None)
    read = {"a": torch.zeros(2)}
    dcp.load(read, checkpoint_id=tmp_path / "one", no_dist=True)
    assert read["a"].tolist() == [1, 1]
    assert [one.name for one in tmp_path.iterdir()] == ["one"]
