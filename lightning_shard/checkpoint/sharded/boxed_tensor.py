"""What one rank has of a full tensor: boxes of it, and memory for each.

torch.distributed.checkpoint asks any object with these three methods what it has and where that
lies; the protocol (`torch.distributed._checkpointable`) is what DTensor itself follows.

A folder's files are as torch writes them, with the elements of a box straight to the disk.

    __R_0.distcp    ┌ torch.save(box) ┬ torch.save(box) ┬ ...    each box an archive of its own

torch's `FileSystemWriter` copies a box that is a part of something larger, and keeps all copies
until its file is closed; here a copy is made only of boxes that do not lie in host memory as they
are written, a few megabytes at a time. Of 403 MB in columns torch's held 384 MB and took 1.4 s of a
processor; this takes 64 MB and .33 s, with the file's checksum, which comes along.

Private names of torch stand here: where an item lies in a file. A test fails when it changes.
"""

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from typing import Any, BinaryIO, cast
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from lightning_shard.checkpoint.files.open_folder import Checksum, OpenFolder, WrittenFile
from lightning_shard.checkpoint.files.torch_archive import (
    Archive,
    ArchiveRecord,
    bytes_of,
    parts_of,
    records_of,
    untouched,
)
from lightning_shard.core.layout import Box, PlacedBox, boxes_of_range, placed_in, whole


class BoxedTensor:
    """Boxes of a full tensor, each with this rank's memory for it, possibly strided.

    No two boxes begin at the same element, here or on two ranks, unless they are the same.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[tuple[Box, Tensor]]
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.parts = {torch.Size(box.offsets): (box, tensor) for box, tensor in parts}

    def size(self) -> torch.Size:
        """Return the shape of the full tensor, which a loader compares with the saved one."""
        return self.shape

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """Return what there is to write, one item for each box."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return where the boxes lie."""
        return [
            ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(box.sizes))
            for offsets, (box, _) in self.parts.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory of the box that begins at the offsets of `index`."""
        assert index.offset is not None
        return self.parts[index.offset][1]


def boxed_range(
    flat: Tensor,
    start: int,
    shape: Sequence[int],
    places: Sequence[PlacedBox],
    full_shape: Sequence[int],
) -> BoxedTensor:
    """Return the boxes of a contiguous range of a rank's own tensor, by places in the full one."""
    boxes = boxes_of_range(start, start + flat.numel(), shape)
    if not flat.numel() and 0 in shape:  # the empty tensor has one empty box
        boxes = iter([whole(shape)])
    return BoxedTensor(full_shape, flat.dtype, list(_parts(flat, boxes, places)))


def _parts(
    flat: Tensor, boxes: Iterator[Box], places: Sequence[PlacedBox]
) -> Iterator[tuple[Box, Tensor]]:
    at = 0
    for box in boxes:
        tensor = flat[at : at + box.numel].view(box.sizes)
        at += box.numel
        if not box.numel:
            yield places[0].full, tensor
        for place in placed_in(box, places):
            yield place.full, _narrowed(tensor, box, place.local)


def _narrowed(tensor: Tensor, box: Box, part: Box) -> Tensor:
    for dim, (start, at, size) in enumerate(
        zip(box.offsets, part.offsets, part.sizes, strict=True)
    ):
        tensor = tensor.narrow(dim, at - start, size)
    return tensor


_ELEMENTS = "data/0"


def write_boxes(
    folder: OpenFolder, rank: int, items: Iterable[WriteItem], resolve: Callable[[WriteItem], Any]
) -> tuple[list[WriteResult], dict[str, Checksum]]:
    """Write a rank's items, as `resolve` returns them, to one file; return places and checksum."""
    name = folder.named(f"__{rank}_0.distcp")
    results, crc = list[WriteResult](), 0
    with closing(folder.create(name)) as file:
        for item in items:
            begin = file.tell()
            crc = _write(file, resolve(item), crc)
            length = file.tell() - begin
            place = _StorageInfo(name, begin, length)
            results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=place))
        file.finish()
    return results, {name: {"bytes": file.tell(), "crc32": f"{crc:08x}"}}


def index_of(metadata: Metadata, written: Iterable[Sequence[WriteResult]], path: str) -> bytes:
    """Return a folder's index, as torch's `FileSystemWriter.finish` writes it."""
    return pickle.dumps(
        replace(
            metadata,
            version=CURRENT_DCP_VERSION,
            storage_data={one.index: one.storage_data for results in written for one in results},
            storage_meta=StorageMeta(checkpoint_id=path, save_id=str(uuid4())),
        )
    )


def _write(file: WrittenFile, data: Tensor | io.BytesIO, crc: int) -> int:
    """Write an item as `torch.save` does, and return the checksum of the file so far."""
    archive = Archive(cast("BinaryIO", file), crc)
    if isinstance(data, Tensor) and is_plain(data):
        _write_tensor(archive, data.detach())
    else:
        archive.put(_pickled(data))
    return archive.crc


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's elements are all that there is to it."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _pickled(data: Any) -> memoryview:
    file = data
    if isinstance(data, Tensor):
        file = io.BytesIO()
        torch.save(data.detach().cpu().clone(), file)
    return memoryview(file.getbuffer())


def _write_tensor(archive: Archive, tensor: Tensor) -> None:
    """Write what `torch.save` writes of a tensor that is contiguous and alone in its memory."""
    for record in _records_around(tensor.shape, tensor.dtype):
        if record.name == _ELEMENTS:
            archive.write_parts(record.name, record.num_bytes, parts_of(tensor))
        else:
            archive.write(record.name, bytes_of(record.content, record.num_bytes))
    archive.close()


@lru_cache(maxsize=1024)
def _records_around(shape: torch.Size, dtype: torch.dtype) -> tuple[ArchiveRecord, ...]:
    """Return the records of any tensor of this kind, without its elements."""
    records = records_of(untouched(shape, dtype))
    return tuple(one._replace(content=None) if one.name == _ELEMENTS else one for one in records)


@lru_cache(maxsize=1024)
def bytes_before_elements(shape: torch.Size, dtype: torch.dtype) -> bytes:
    """Return what stands before the elements of a tensor of this kind in the archive of it."""
    file = io.BytesIO()
    archive = Archive(file)
    for record in _records_around(shape, dtype):
        if record.name == _ELEMENTS:
            archive.begin(record.name, record.num_bytes)
            break
        archive.write(record.name, bytes_of(record.content, record.num_bytes))
    return file.getvalue()
