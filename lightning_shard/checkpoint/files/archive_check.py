"""Verifies a file of `torch.save`: torch stores a CRC-32 of each record, and never looks at it.

    ┌ local header ┬ record ┬ descriptor ┐┌ … ┐┌ directory ┬ end ┐      a zip archive
      name           bytes    CRC, length        name, CRC, length, offset of each record

All three must agree, and records must lie one behind the other: then no length and no offset can be
wrong without a word. A file that torch was told to write without checksums has zeros in their
place, and is taken as it is.
"""

import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

_CHUNK_BYTES = 1 << 18  # stays in the processor's cache between the copy and the sum
_HEADER = struct.Struct("<4s5H3I2H")
_SHORT, _LONG = struct.Struct("<4s3I"), struct.Struct("<4sI2Q")
_HAS_DESCRIPTOR = 8
_IS_FOLDER = 0x10  # for which torch reads nothing


class DamagedError(Exception):
    """Something in an archive is not as it was written; says what, as a clause."""


class DamagedRecordError(DamagedError):
    """The bytes of one record are not as they were written.

    Attributes:
        record: Name of the record in the archive, such as "data/3".
    """

    def __init__(self, record: str, message: str) -> None:
        super().__init__(message)
        self.record = record


class Share(NamedTuple):
    """A share of an archive's tensors, where several processes check one file between them.

    Attributes:
        number: Which share this is.
        of: Number of shares.
    """

    number: int
    of: int


ALL = Share(0, 1)


def check_archive(file: BinaryIO, share: Share = ALL) -> None:
    """Read an archive, and compare its records with their checksums.

    Args:
        file: Seekable, unbuffered is fastest.
        share: The tensors whose elements are read; all else is checked always.

    Raises:
        DamagedError: Something is not as it was written.
    """
    try:
        archive = zipfile.ZipFile(file)
        records = sorted(archive.infolist(), key=lambda one: one.header_offset)
        directory = archive.start_dir
    except Exception as error:  # of whatever garbage looks like
        raise DamagedError(
            "its end is missing or damaged, where a list of its records was expected"
        ) from error
    if not records:
        raise DamagedError("it holds no records")
    has_sums = any(one.CRC for one in records)
    end = 0
    for one, following in zip(records, [*records[1:], None], strict=True):
        limit = directory if following is None else following.header_offset
        begin = _begin_of(file, one, end)
        end = begin + one.compress_size
        if one.compress_type == zipfile.ZIP_STORED and one.compress_size != one.file_size:
            raise DamagedRecordError(one.filename, "its lengths contradict each other")
        _check_descriptor(file, one, end, limit)
        if has_sums and _is_in(share, one, begin, directory):
            _check_sum(file, archive, one, begin)
        end = limit


def _is_in(share: Share, one: zipfile.ZipInfo, begin: int, end: int) -> bool:
    """Whether a record is checked for a share: what holds no elements is for each."""
    if "/data/" not in one.filename:
        return True
    middle = begin + one.compress_size // 2  # of the file, so that shares are of one size
    return min(middle * share.of // max(end, 1), share.of - 1) == share.number


def _begin_of(file: BinaryIO, one: zipfile.ZipInfo, expected: int) -> int:
    """Return where the bytes of a record begin, from its own header."""
    if one.external_attr & _IS_FOLDER or one.volume:
        raise DamagedRecordError(one.filename, "the archive's list says that it is no record")
    if one.header_offset != expected:
        raise DamagedRecordError(
            one.filename, f"it begins at byte {one.header_offset}, expected {expected}"
        )
    file.seek(one.header_offset)
    header = file.read(_HEADER.size)
    fields = _HEADER.unpack(header) if len(header) == _HEADER.size else (b"",)
    if fields[0] != b"PK\x03\x04":
        raise DamagedRecordError(one.filename, "its header is damaged")
    _, _, flags, kind, _, _, _, _, _, name_bytes, extra_bytes = fields
    name = file.read(name_bytes)
    own = one.orig_filename.encode("utf-8" if flags & 0x800 else "cp437", errors="replace")
    if (flags, kind) != (one.flag_bits, one.compress_type) or name != own:
        raise DamagedRecordError(one.filename, "its header is not that of the archive's list")
    return one.header_offset + int(_HEADER.size + name_bytes + extra_bytes)


def _check_descriptor(file: BinaryIO, one: zipfile.ZipInfo, end: int, limit: int) -> None:
    """Check what stands between a record and the next one: its checksum and lengths, or nothing."""
    gap = limit - end
    if gap == 0:
        return
    expected = b"PK\x07\x08", one.CRC, one.compress_size, one.file_size
    for form in (_SHORT, _LONG):
        if gap == form.size and one.flag_bits & _HAS_DESCRIPTOR:
            file.seek(end)
            if form.unpack(file.read(gap)) == expected:
                return
    raise DamagedRecordError(
        one.filename, f"it ends at byte {end}, and what follows is not its checksum"
    )


def _check_sum(file: BinaryIO, archive: zipfile.ZipFile, one: zipfile.ZipInfo, begin: int) -> None:
    found = _sum(_stored(file, begin, one.file_size))
    if one.compress_type != zipfile.ZIP_STORED:
        try:
            with archive.open(one) as content:
                found = _sum(iter(lambda: content.read(_CHUNK_BYTES), b""))
        except Exception as error:
            raise DamagedRecordError(one.filename, f"it cannot be unpacked: {error}") from error
    if found != one.CRC:
        raise DamagedRecordError(
            one.filename, f"its checksum is {found:08x}, expected {one.CRC:08x}"
        )


def _sum(chunks: Iterator[bytes | memoryview]) -> int:
    crc = 0
    for chunk in chunks:
        crc = zlib.crc32(chunk, crc)
    return crc


def _stored(file: BinaryIO, begin: int, length: int) -> Iterator[memoryview]:
    """Yield the bytes of a record, in a buffer that is used again."""
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, length)))
    file.seek(begin)
    while length > 0:
        num_read = file.readinto(buffer[:length])  # type: ignore[attr-defined]
        if not num_read:
            return
        yield buffer[:num_read]
        length -= num_read
