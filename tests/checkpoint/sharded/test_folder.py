"""A rank reads the elements that it needs, from folders of this package and of torch."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from typing_extensions import override

from lightning_shard.checkpoint.background_saves import write_folder
from lightning_shard.checkpoint.sharded import folder as folder_module
from lightning_shard.checkpoint.sharded.boxed_tensor import BoxedTensor
from lightning_shard.checkpoint.sharded.folder import StoredFolder, read_part
from lightning_shard.core.layout import Box, whole
from lightning_shard.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHAPE = (6, 5, 4)
FULL = torch.arange(120.0).view(SHAPE)


class Counting(io.BytesIO):
    """Notes the reads."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.reads: list[int] = []

    @override
    def readinto(self, buffer: Any) -> int:
        self.reads.append(len(buffer))
        return super().readinto(buffer)


PARTS = [
    ((0, 0, 0), (6, 5, 4)),
    ((2, 0, 0), (3, 5, 4)),
    ((1, 1, 0), (4, 3, 4)),
    ((0, 2, 1), (6, 2, 2)),
    ((5, 4, 3), (1, 1, 1)),
]


@pytest.mark.parametrize("part_bytes", [4, 40, 100, 1 << 20])
@pytest.mark.parametrize(("offsets", "sizes"), PARTS)
@pytest.mark.parametrize("kind", ["contiguous", "strided", "another format"])
def test_any_part_of_a_box(
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    part_bytes: int,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(folder_module, "PART_BYTES", part_bytes)
    target = torch.zeros(sizes, dtype=torch.float64 if kind == "another format" else torch.float32)
    if kind == "strided":
        target = torch.zeros(sizes[::-1]).permute(2, 1, 0)
    file = Counting(b"head" + FULL.numpy().tobytes())
    read_part(file, 4, SHAPE, torch.float32, offsets, target)
    a, b, c = (slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
    torch.testing.assert_close(target, FULL[a, b, c].to(target.dtype), rtol=0, atol=0)
    if kind != "contiguous":
        assert max(file.reads) <= max(part_bytes, 4)


def test_a_number_and_a_file_that_ends_too_early() -> None:
    number = torch.zeros(())
    read_part(io.BytesIO(torch.tensor(3.0).numpy().tobytes()), 0, (), torch.float32, (), number)
    assert number == 3
    with pytest.raises(OSError, match="ends 80 bytes before"):
        read_part(io.BytesIO(bytes(400)), 0, SHAPE, torch.float32, (0, 0, 0), torch.zeros(SHAPE))


def part_of(tensor: Tensor, box: Box) -> BoxedTensor:
    return BoxedTensor(SHAPE, tensor.dtype, [(box, tensor)])


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("torch's reader has made a tensor of the whole box")


@pytest.mark.parametrize("whose", ["ours", "torch's"])
def test_a_folder_of_either_writer_is_read_in_part(
    tmp_path: Path, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if whose == "ours":
        write_folder(tmp_path / "one", {"a": part_of(FULL.clone(), whole(SHAPE))}, {}, None)
    else:
        dcp.save({"a": FULL.clone()}, checkpoint_id=tmp_path / "one", no_dist=True)
    monkeypatch.setattr(torch, "load", never)
    target = torch.zeros(2, 3, 4)
    StoredFolder(tmp_path / "one").read({"a": part_of(target, Box((3, 1, 0), (2, 3, 4)))})
    torch.testing.assert_close(target, FULL[3:5, 1:4], rtol=0, atol=0)


def test_a_box_with_strides_of_its_own_is_read_by_torch(tmp_path: Path) -> None:
    dcp.save({"a": FULL.transpose(0, 2)}, checkpoint_id=tmp_path / "one", no_dist=True)
    target = torch.zeros(4, 5, 6)
    StoredFolder(tmp_path / "one").read({"a": target})
    torch.testing.assert_close(target, FULL.transpose(0, 2), rtol=0, atol=0)


def test_a_file_that_lacks_its_end_is_told(tmp_path: Path) -> None:
    write_folder(tmp_path / "one", {"a": part_of(FULL.clone(), whole(SHAPE))}, {}, None)
    place = tmp_path / "one" / "__0_0.distcp"
    (stored,) = FileSystemReader(tmp_path / "one").read_metadata().storage_data.values()
    content = place.read_bytes()
    place.write_bytes(content[: stored.length // 2])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged: it has"):
        StoredFolder(tmp_path / "one").read({"a": torch.zeros(SHAPE)})


def test_a_file_that_lacks_its_end_is_told_in_a_folder_of_others(tmp_path: Path) -> None:
    dcp.save({"a": FULL.clone()}, checkpoint_id=tmp_path / "one", no_dist=True)
    place = tmp_path / "one" / "__0_0.distcp"
    (stored,) = FileSystemReader(tmp_path / "one").read_metadata().storage_data.values()
    place.write_bytes(place.read_bytes()[: stored.length // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        StoredFolder(tmp_path / "one").read({"a": torch.zeros(SHAPE)})
