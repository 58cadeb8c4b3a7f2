"""torch's writer of folders, with the elements of a box straight from its memory to the disk.

    __R_0.distcp    ┌ torch.save(box) ┬ torch.save(box) ┬ ...    each box an archive of its own

torch's own copies a box that is a part of something larger, and keeps all copies until its file is
closed; here a copy is made only of boxes that do not lie in host memory as they are written, a
few megabytes at a time. The file's checksum comes along with those of its boxes.

Private names of torch stand here: where an item lies in a file. A test fails when it changes.
"""

import io
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_shard.checkpoint.files.open_folder import Checksum, OpenFolder, WrittenFile
from lightning_shard.checkpoint.files.torch_archive import (
    Archive,
    ArchiveRecord,
    bytes_of,
    parts_of,
    records_of,
    untouched,
)

_ELEMENTS = "data/0"


class _IndexInMemory(FileSystem):
    """Keeps in memory what torch would write itself, which is the index."""

    def __init__(self) -> None:
        self.file = io.BytesIO()

    @override
    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        yield self.file

    @override
    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return suffix

    @override
    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False

    @override
    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: the folder is there."""

    @override
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Do nothing: the file is in memory."""


class BoxWriter(FileSystemWriter):
    """Writes a rank's boxes to one file, and has it stored."""

    def __init__(self, folder: OpenFolder) -> None:
        super().__init__(folder.path)
        self.sync_files = False  # of memory: it would sync all filesystems
        self._kept = _IndexInMemory()
        self.fs, self.path = self._kept, folder.path
        self.checksums: dict[str, Checksum] = {}
        self._folder = folder

    @property
    def index(self) -> bytes:
        """The folder's index, once `finish` was called; only rank 0 has one."""
        return self._kept.file.getvalue()

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = self._folder.named(f"{plan.storage_data.prefix}0.distcp")
        results, crc = list[WriteResult](), 0
        with closing(self._folder.create(name)) as file:
            for item in plan.items:
                begin = file.tell()
                crc = _write(file, planner.resolve_data(item), crc)
                length = file.tell() - begin
                place = _StorageInfo(name, begin, length)
                results.append(
                    WriteResult(index=item.index, size_in_bytes=length, storage_data=place)
                )
            file.finish()
        self.checksums[name] = {"bytes": file.tell(), "crc32": f"{crc:08x}"}
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def renamed(results: Sequence[WriteResult], names: Mapping[str, str]) -> list[WriteResult]:
    """Return where the items of files are that have other names now."""
    return [
        replace(
            one,
            storage_data=replace(
                one.storage_data, relative_path=names[one.storage_data.relative_path]
            ),
        )
        for one in results
    ]


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
