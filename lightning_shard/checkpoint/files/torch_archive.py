"""The archive of `torch.save`, record by record, as fast as the disk.

    data.pkl    the object, with numbers in the place of storages      first
    data/0      the elements of a storage                              when they are at hand
    data/1      ...
    version     what torch reads

torch makes a checkpoint's pickle and its list of storages, which is private: a test fails when it
changes. Records are written here: their elements may come later than the pickle, one storage after
the other, and go from memory to the file without a copy. `torch.load` reads and maps them.

`torch.save` is as fast with tensors that are there (.27 s of a processor for 400 MB, .28 s here),
but needs each whole: one of 419 MB that arrives in parts takes it 400 MB and 1.9 s, and 44 MB and
.3 s here. The sum of a whole file would be a second pass there, of .15 s more.
"""

import hashlib
import mmap
import pickle
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.serialization import _save

_ALIGNMENT = 64  # of the elements in the file
PART_BYTES = 4 << 20
_CHUNK_BYTES = 1 << 20  # stays in the processor's cache between its checksum and the write
_MAX_32 = 0xFFFFFFFF
_LONG_FROM = _MAX_32  # what takes fields of 64 bits
_FLAGS = 0x808  # checksum and lengths follow the record; names are UTF-8
HEADER = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
SHORT, LONG = struct.Struct("<4s3I"), struct.Struct("<4sI2Q")
_END_64, _LOCATOR = struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_FOLDER = "archive"
_POLYNOMIAL = 0xEDB88320  # of zip and zlib, without x^32
_ONE, _X = 1 << 31, 1 << 30
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, unknown to Python 3.11


def joined_crc(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of a string that is followed by another.

    A checksum is the remainder of a polynomial over two elements, whose first coefficient is the
    lowest bit; a byte that follows multiplies it by x^8.

    Source:
        `crc32_combine` of zlib, which Python does not wrap.
    """
    return _product(_factor(second_bytes), first) ^ second


@lru_cache(maxsize=1024)
def _factor(num_bytes: int) -> int:
    """Return x^(8 * num_bytes)."""
    factor, power, left = _ONE, _X, 8 * num_bytes
    while left:
        if left & 1:
            factor = _product(factor, power)
        power = _product(power, power)
        left >>= 1
    return factor


def _product(one: int, other: int) -> int:
    total = 0
    while one:
        if one & _ONE:
            total ^= other
        one = one << 1 & 0xFFFFFFFF
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return total


class ArchiveRecord(NamedTuple):
    """One record of an archive that is yet to be written, whole or in parts to run through once."""

    name: str
    content: Any
    num_bytes: int


def records_of(obj: object) -> list[ArchiveRecord]:
    """Return the records of which `torch.save` would make its file, in order; nothing is copied."""
    collected = _Collected()
    _save(obj, collected, pickle, 2, False)  # type: ignore[no-untyped-call]
    return [*collected.records, ArchiveRecord("version", b"3\n", 2)]


def records_awaiting(
    obj: object, awaited: Mapping[Any, Tensor]
) -> Iterator[tuple[ArchiveRecord, Any]]:
    """Yield the records of an object, with the key of what elements come later; else with None."""
    keys = {one.data_ptr(): key for key, one in awaited.items() if one.numel()}
    for record in records_of(obj):
        is_storage = isinstance(record.content, torch.UntypedStorage)
        yield record, keys.get(record.content.data_ptr()) if is_storage else None


class _Collected:
    """Takes what torch writes, in the place of its writer."""

    def __init__(self) -> None:
        self.records: list[ArchiveRecord] = []

    def write_record(self, name: str, content: Any, num_bytes: int) -> None:
        data = content.encode() if isinstance(content, str) else content
        self.records.append(ArchiveRecord(name, data, num_bytes))


def bytes_of(content: Any, num_bytes: int) -> memoryview:
    """Return the elements of a storage on the CPU, or bytes, without a copy."""
    if isinstance(content, torch.UntypedStorage):
        flat: Any = torch.empty(0, dtype=torch.uint8).set_(content).numpy()
        return memoryview(flat)[:num_bytes]
    return memoryview(content)[:num_bytes]


def write_archive(file: BinaryIO, records: Iterable[ArchiveRecord]) -> "Archive":
    """Write a file that `torch.load` reads; return the archive, which knows its checksum."""
    archive = Archive(file)
    for record in records:
        if isinstance(record.content, Iterator):
            archive.write_parts(record.name, record.num_bytes, record.content)
        else:
            archive.write(record.name, bytes_of(record.content, record.num_bytes))
        del record  # and its elements, before the next one's come
    archive.close()
    return archive


class Archive:
    """A zip archive of records that are not compressed, written from its beginning to its end."""

    def __init__(self, file: BinaryIO, crc: int = 0) -> None:
        self.crc = crc
        self._file = file
        self._offset = 0
        self._entries: list[bytes] = []
        self._sums = hashlib.sha1(usedforsecurity=False)

    def write(self, name: str, content: memoryview) -> None:
        """Write one record, whose elements begin at a multiple of 64 bytes."""
        self.write_parts(name, content.nbytes, [content])

    def write_parts(self, name: str, size: int, parts: Iterable[memoryview]) -> None:
        """Write one record of `size` bytes, which come part by part."""
        begin = self._offset
        path, is_long = self.begin(name, size)
        first = self._offset
        crc = self._put_elements(parts)
        assert self._offset == first + size, f"{name} has come with another size"
        if size:
            form = LONG if is_long else SHORT
            self.put(form.pack(b"PK\7\b", crc, size, size))
        self._sums.update(path + crc.to_bytes(4, "little"))
        self._entries.append(_entry(path, crc, size, begin))

    def begin(self, name: str, size: int) -> tuple[bytes, bool]:
        """Write what comes before a record's elements; return its path, and if it is a long one."""
        path, begin = f"{_FOLDER}/{name}".encode(), self._offset
        is_long = max(size, begin) >= _LONG_FROM
        extra = _sizes_64(size, size) if is_long else b""
        extra += _padding(begin + HEADER.size + len(path) + len(extra))
        told = (_MAX_32, _MAX_32) if is_long else (0, 0)
        version = 45 if is_long else 0
        kind = (version, _FLAGS, 0, 0, 0)
        self.put(HEADER.pack(b"PK\3\4", *kind, 0, *told, len(path), len(extra)))
        self.put(path + extra)
        return path, is_long

    def _put_elements(self, parts: Iterable[memoryview]) -> int:
        crc, begin = 0, self._offset
        for part in parts:
            for start in range(0, part.nbytes, _CHUNK_BYTES):
                chunk = part[start : start + _CHUNK_BYTES]
                crc = zlib.crc32(chunk, crc)
                self._file.write(chunk)
            self._offset += part.nbytes
        self.crc = joined_crc(self.crc, crc, self._offset - begin)
        return crc

    def close(self) -> None:
        """Write what readers begin with, at the end."""
        self.write(".data/serialization_id", memoryview(self._number()))
        begin, count = self._offset, len(self._entries)
        directory = b"".join(self._entries)
        self.put(directory)
        size, end = len(directory), self._offset
        self.put(_END_64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, begin))
        self.put(_LOCATOR.pack(b"PK\6\7", 0, end, 1))
        short = min(count, 0xFFFF)
        self.put(
            _END.pack(b"PK\5\6", 0, 0, short, short, min(size, _MAX_32), min(begin, _MAX_32), 0)
        )

    def _number(self) -> bytes:
        """Return forty digits that are another archive's only if it has the same records."""
        return str(int.from_bytes(self._sums.digest()[:16], "little")).zfill(40).encode()

    def put(self, content: bytes | memoryview) -> None:
        """Write bytes that are no record."""
        self._file.write(content)
        self.crc = zlib.crc32(content, self.crc)
        self._offset += len(content)


def _padding(begin: int) -> bytes:
    """Return an extra field, of four bytes at least, behind which a multiple of 64 bytes begins."""
    missing = -(begin + 4) % _ALIGNMENT
    return struct.pack("<2sH", b"FB", missing) + b"Z" * missing


def _sizes_64(*sizes: int) -> bytes:
    return struct.pack(f"<2H{len(sizes)}Q", 1, 8 * len(sizes), *sizes)


def _entry(path: bytes, crc: int, size: int, begin: int) -> bytes:
    long = [one for one in (size, size, begin) if one >= _LONG_FROM]
    extra = _sizes_64(*long) if long else b""
    told, at = (_MAX_32 if one >= _LONG_FROM else one for one in (size, begin))
    kind = (0, 45 if long else 0, _FLAGS, 0, 0, 0)
    head = _ENTRY.pack(b"PK\1\2", *kind, crc, told, told, len(path), len(extra), 0, 0, 0, 0, at)
    return head + path + extra


def parts_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor's elements in order, without a copy where they lie so."""
    if tensor.is_contiguous():
        flat = tensor.view(-1).view(torch.uint8)
        step = max(1, flat.numel()) if flat.is_cpu else PART_BYTES
        for first in range(0, flat.numel(), step):
            yield flat[first : first + step].cpu().numpy().data
    elif tensor.nbytes <= PART_BYTES:
        yield from parts_of(tensor.contiguous())
    elif tensor[0].nbytes > PART_BYTES:
        for row in tensor:
            yield from parts_of(row)
    else:
        num_rows = PART_BYTES // tensor[0].nbytes
        for first in range(0, len(tensor), num_rows):
            yield from parts_of(tensor[first : first + num_rows])


def untouched(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor on the CPU whose elements nobody may look at; its memory takes none."""
    num_bytes = shape.numel() * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, num_bytes, flags=flags)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
