"""Reading a checkpoint file: verified first, every failure told by name, its tensors one by one.

    ┌ local header ┬ record ┬ descriptor ┐┌ … ┐┌ directory ┬ end ┐      a zip archive
      name           bytes    CRC, length        name, CRC, length, offset of each record

torch stores a CRC-32 of each record, and never looks at it. Here all three must agree, and records
must lie one behind the other: then no length and no offset can be wrong without a word. Python's
`zipfile` compares headers and checksums, and no descriptors: it takes a record for empty whose
lengths and checksum are zeros in the directory. A file that torch was told to write without
checksums has zeros in their place, and is taken as it is, as is one of torch before 1.6.

An archive's list of tensors is read without running code: something inert is in the place of every
class. `torch.load` onto "meta" tells shapes and places as well, but refuses other classes or runs
their code. What torch calls to make a tensor again is private, and a test fails when it changes.
"""

import io
import os
import pickle
import shutil
import struct
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.checkpoint.files.places import local_path, opened
from lightning_shard.checkpoint.files.torch_archive import HEADER, LONG, SHORT
from lightning_shard.errors import CheckpointError, CheckpointNotFoundError

_CHUNK_BYTES = 1 << 18  # stays in the processor's cache between the copy and the sum
_HAS_DESCRIPTOR = 8
_IS_FOLDER = 0x10  # for which torch reads nothing
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "UntypedStorage": torch.uint8,
}
_PLAIN = {("collections", "OrderedDict"): OrderedDict, ("torch", "Size"): torch.Size}


class DamagedError(Exception):
    """Something in an archive is not as it was written; says what, as a clause."""

    def __init__(self, message: str, record: str = "") -> None:
        super().__init__(message)
        self.record = record


class Share(NamedTuple):
    """The share of an archive's tensors that one of several processes checks."""

    number: int
    of: int


ALL = Share(0, 1)


def check_archive(file: BinaryIO, share: Share = ALL) -> None:
    """Read an archive, and compare its records with their checksums; of elements, a share."""
    try:
        archive = zipfile.ZipFile(file)
        records = sorted(archive.infolist(), key=lambda one: one.header_offset)
        limits = [*(one.header_offset for one in records[1:]), archive.start_dir]
    except Exception as error:  # of whatever garbage looks like
        raise DamagedError(
            "its end is missing or damaged, where a list of its records was expected"
        ) from error
    if not records:
        raise DamagedError("it holds no records")
    has_sums = any(one.CRC for one in records)
    if begin := records[0].header_offset:
        raise DamagedError(f"it begins at byte {begin}, expected 0", records[0].filename)
    for one, limit in zip(records, limits, strict=True):
        if one.external_attr & _IS_FOLDER or one.volume:
            raise DamagedError("the archive's list says that it is no record", one.filename)
        if one.compress_type == zipfile.ZIP_STORED and one.compress_size != one.file_size:
            raise DamagedError("its lengths contradict each other", one.filename)
        try:
            with archive.open(one) as content:  # which compares its header with the list
                _check_descriptor(file, one, limit)
                is_checked = has_sums and _is_in(share, one, limits[-1])
                while is_checked and content.read(_CHUNK_BYTES):
                    pass
        except DamagedError:
            raise
        except Exception as error:
            raise DamagedError(
                f"its checksum is not {one.CRC:08x}, or its header is not that of the archive's "
                f"list ({error})",
                one.filename,
            ) from error


def _is_in(share: Share, one: zipfile.ZipInfo, end: int) -> bool:
    """Whether a record is checked for a share: what holds no elements is for each."""
    if "/data/" not in one.filename:
        return True
    middle = one.header_offset + one.compress_size // 2  # of the file: shares are of one size
    return min(middle * share.of // max(end, 1), share.of - 1) == share.number


def _check_descriptor(file: BinaryIO, one: zipfile.ZipInfo, limit: int) -> None:
    """Check what stands between a record and the next one: its checksum and lengths, or nothing."""
    file.seek(one.header_offset)
    *_, name_bytes, extra_bytes = HEADER.unpack(file.read(HEADER.size))
    end = one.header_offset + HEADER.size + name_bytes + extra_bytes + one.compress_size
    gap = limit - end
    if gap == 0:
        return
    expected = b"PK\x07\x08", one.CRC, one.compress_size, one.file_size
    for form in (SHORT, LONG):
        if gap == form.size and one.flag_bits & _HAS_DESCRIPTOR:
            file.seek(end)
            if form.unpack(file.read(gap)) == expected:
                return
    raise DamagedError(f"it ends at byte {end}, and what follows is not its checksum", one.filename)


class Opaque(dict[Any, Any]):
    """Stands for an object of another class: its entries where it is a mapping, else nothing."""

    made_of: tuple[Any, ...] = ()

    def __init__(self, *made_of: Any, **__: Any) -> None:
        super().__init__()
        self.made_of = made_of

    def __call__(self, *_: Any, **__: Any) -> "Opaque":
        """Do nothing, as what is called while an object is made again."""
        return Opaque()

    def __setstate__(self, _: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        """Take an element, as a list does."""

    def extend(self, _: Any) -> None:
        """Take elements, as a list does."""

    @override
    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


class Storage(NamedTuple):
    """The elements of a tensor: the number of their record as text, and the storage's format."""

    record: str
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class RecordTensor:
    """A tensor whose elements lie in a record of an archive, from element `start` on."""

    archive: "ArchiveFile"
    record: str
    dtype: torch.dtype
    start: int
    shape: torch.Size
    stride: tuple[int, ...]

    def read(self) -> Tensor:
        """Read the elements, and those between them where the tensor is strided."""
        if not prod(self.shape):
            return torch.empty(self.shape, dtype=self.dtype)
        pairs = zip(self.shape, self.stride, strict=True)
        length = 1 + sum((size - 1) * stride for size, stride in pairs)
        size = self.dtype.itemsize
        content = self.archive.read(self.record, self.start * size, length * size)
        flat = torch.frombuffer(content, dtype=torch.uint8).view(self.dtype)
        return flat.as_strided(self.shape, self.stride).contiguous()


class ArchiveFile:
    """A file of `torch.save`, opened."""

    def __init__(self, path: Any) -> None:
        self._path = path
        self._known: dict[Any, RecordTensor] = {}
        self.has_objects = False
        try:
            with opened(path) as file, zipfile.ZipFile(file) as archive:
                self._records = {one.filename: one for one in archive.infolist()}
                self._folder = next(iter(self._records)).partition("/")[0]
                pickled = archive.read(f"{self._folder}/data.pkl")
                order = self._records.get(f"{self._folder}/byteorder")
                self._is_little = order is None or archive.read(order) == b"little"
            self.content = _Reader(io.BytesIO(pickled), self).load()
        except Exception as error:  # whatever a damaged file leads to
            raise self._damaged(error) from error
        if not self._is_little:
            raise CheckpointError(
                f"{path} was written by a big-endian processor, expected a little-endian one's "
                f"elements. Load it with torch.load and save it again."
            )

    def tensor(self, storage: Any, start: int, shape: Any, stride: Any) -> RecordTensor:
        """Return a tensor of a storage; the same object for the same elements."""
        record, dtype = storage
        place = (record, dtype, start, torch.Size(shape), tuple(stride))
        if place not in self._known:
            self._known[place] = RecordTensor(self, *place)
        return self._known[place]

    def read(self, record: str, start: int, length: int) -> bytearray:
        """Read bytes of the record of a storage."""
        info = self._records.get(f"{self._folder}/data/{record}")
        content = bytearray(length)
        try:
            if info is None or start + length > info.file_size or info.compress_type:
                raise ValueError(f"there are no {length} bytes from {start} on")
            with opened(self._path) as file:
                file.seek(info.header_offset)
                *_, name_bytes, extra_bytes = HEADER.unpack(file.read(HEADER.size))
                file.seek(name_bytes + extra_bytes + start, os.SEEK_CUR)
                if file.readinto(content) != length:
                    raise ValueError("the file ends in them")
        except (OSError, ValueError, struct.error) as error:
            raise self._damaged(error, f"the record data/{record}") from error
        return content

    def name_of(self, record: str) -> str | None:
        """Return the path of keys to the tensor of a record; None where nobody can tell.

        archive/data/3    ─>    state_dict.layer.0.weight
        """
        wanted = record.partition("/data/")[2]
        return next((path for path, one in _records_in(self.content, "") if one == wanted), None)

    def _damaged(self, error: Exception, what: str = "its list of tensors") -> CheckpointError:
        return CheckpointError(
            f"{self._path} is damaged, or no file of torch.save: {what} cannot be read ({error}). "
            f"Load another checkpoint, or copy this one again from where it is whole."
        )


def _records_in(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path of keys to each tensor, and the number of the record that it lies in."""
    if isinstance(value, (RecordTensor, Storage)):
        yield path, value.record
        return
    if isinstance(value, Opaque):  # a tensor of a kind that is read by torch alone, say
        for one in value.made_of:
            yield from _records_in(one, path)
    children: Any = ()
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, (list, tuple)):
        children = enumerate(value)
    for key, child in children:
        yield from _records_in(child, f"{path}.{key}" if path else str(key))


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, archive: ArchiveFile) -> None:
        super().__init__(file)
        self._archive = archive

    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in _PLAIN:
            return _PLAIN[module_name, global_name]
        if module_name == "torch._utils" and global_name in _REBUILDS:
            return getattr(self, _REBUILDS[global_name])
        if module_name in ("torch", "torch.storage"):
            value = getattr(torch, global_name, None)
            if isinstance(value, torch.dtype):
                return value
            if global_name in _STORAGES:
                return _STORAGES[global_name]
        self._archive.has_objects = True
        return type(global_name, (Opaque,), {"__module__": module_name})

    @override
    def persistent_load(self, pid: Any, /) -> Any:
        _, dtype, record, *_ = pid
        return Storage(str(record), dtype)

    def rebuilt(self, storage: Any, start: int, shape: Any, stride: Any, *_: Any) -> Any:
        return self._archive.tensor(storage, start, shape, stride)

    def rebuilt_of_bytes(self, storage: Any, *told: Any) -> Any:
        start, shape, stride, _, _, dtype, *_ = told
        return self._archive.tensor((storage[0], dtype), start, shape, stride)

    def rebuilt_parameter(self, data: Any, *_: Any) -> Any:
        return data


_REBUILDS = {
    "_rebuild_tensor": "rebuilt",
    "_rebuild_tensor_v2": "rebuilt",
    "_rebuild_tensor_v3": "rebuilt_of_bytes",
    "_rebuild_parameter": "rebuilt_parameter",
    "_rebuild_parameter_with_state": "rebuilt_parameter",
}
"""By torch's name of what makes a tensor again, the method here."""


_ARCHIVE = b"PK\x03\x04"
_OLD = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # the number that files without an archive begin with
_HEAD_BYTES = 32
_ANOTHER = "Load another checkpoint, or copy this one again from where it is whole."


def read_file(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Load what `torch.save` has written, local or remote, once it fits its checksums."""
    with _local_copy(path) as (source, file):
        _check(path, file)
        return _loaded(path, source, map_location, weights_only, mmap=False)


def read_mapped(path: Any, weights_only: bool | None = None, *, share: Share = ALL) -> Any:
    """Load a file with its tensors mapped into memory: what is not looked at is not read.

    They are on the CPU, and can be written to, which does not change the file. Who keeps one must
    copy it, since the file may become shorter later. Of a local file the checksums of a share of
    the tensors are compared here, and others compare the rest; of a remote one, which is copied,
    all are.
    """
    with _local_copy(path) as (source, file):
        is_archive = _check(path, file, share if local_path(path) is not None else ALL)
        return _loaded(path, source, "cpu", weights_only, mmap=is_archive)


def _loaded(
    path: Any, source: Path, map_location: Any, weights_only: bool | None, *, mmap: bool
) -> Any:
    try:
        return torch.load(source, map_location=map_location, weights_only=weights_only, mmap=mmap)
    except MemoryError:
        raise
    except Exception as error:
        raise _not_loaded(path, source, weights_only, error) from error


@contextmanager
def _local_copy(path: Any) -> Iterator[tuple[Path, BinaryIO]]:
    """Open a file, on this machine's filesystems."""
    place = local_path(path)
    if place is not None:
        with _open(path, place) as file:
            yield place, file
        return
    with tempfile.NamedTemporaryFile(prefix="lightning_shard_", suffix=".ckpt") as copy:
        try:
            with opened(path) as remote:
                shutil.copyfileobj(remote, copy, 1 << 22)
            copy.flush()
        except OSError as error:
            raise _cannot_read(path, error) from error
        with open(copy.name, "rb", buffering=0) as file:
            yield Path(copy.name), file


def _open(path: Any, place: Path) -> Any:
    try:
        return place.open("rb", buffering=0)
    except IsADirectoryError as error:
        raise CheckpointError(
            f"{os.fspath(path)} is a folder, expected a checkpoint file. {_ANOTHER}"
        ) from error
    except OSError as error:
        raise _cannot_read(path, error) from error


def _cannot_read(path: Any, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointNotFoundError(
            f"Checkpoint file not found: {os.fspath(path)}. Expected a file that this host can "
            f"see; check the path, and that the folder is shared by all hosts."
        )
    return CheckpointError(
        f"{os.fspath(path)} cannot be read: {error.strerror or error}. {_ANOTHER}"
    )


def _check(path: Any, file: BinaryIO, share: Share = ALL) -> bool:
    """Check a file, and return whether it is an archive; before torch 1.6 there were none."""
    try:
        head = file.read(_HEAD_BYTES)
        if head.startswith(_ARCHIVE):
            check_archive(file, share)
    except OSError as error:
        raise _cannot_read(path, error) from error
    except DamagedError as error:
        raise _damaged(path, file, error) from error
    if not head:
        raise CheckpointError(f"{os.fspath(path)} is empty, expected a checkpoint. {_ANOTHER}")
    if not head.startswith(_ARCHIVE) and _OLD not in head:
        raise CheckpointError(
            f"{os.fspath(path)} is no checkpoint, or its beginning is damaged: it begins with "
            f"{head[:8]!r}, expected {_ARCHIVE!r} as torch.save writes. {_ANOTHER}"
        )
    return head.startswith(_ARCHIVE)


def _damaged(path: Any, file: BinaryIO, error: DamagedError) -> CheckpointError:
    if not error.record:
        length = file.seek(0, os.SEEK_END)
        return CheckpointError(
            f"{os.fspath(path)} is damaged or not complete, at {length} bytes: {error}. {_ANOTHER}"
        )
    name = None
    with suppress(Exception):  # of a file that is damaged, and more than the name is not there
        name = ArchiveFile(file.name).name_of(error.record)
    tensor = f", of {name!r}," if name else ""
    return CheckpointError(
        f"{os.fspath(path)} is damaged: the record {error.record!r}{tensor} is not as it was "
        f"written: {error}. {_ANOTHER}"
    )


def _not_loaded(
    path: Any, source: Path, weights_only: bool | None, error: Exception
) -> CheckpointError:
    """Return the error of a file that is as it was written, and does not load."""
    is_refused = weights_only is not False and isinstance(error, pickle.UnpicklingError)
    names = _objects_in(source) if is_refused else []
    if names:
        return CheckpointError(
            f"{os.fspath(path)} holds objects of {', '.join(names)}, and weights_only="
            f"{weights_only} loads only tensors and plain values. Pass weights_only=False if you "
            f"trust whoever has written it: loading them runs code. Or allow these classes with "
            f"torch.serialization.add_safe_globals."
        )
    told = str(error).strip().partition("\n")[0]
    return CheckpointError(
        f"{os.fspath(path)} cannot be loaded: {type(error).__name__}: {told}. Expected what "
        f"torch.save has written, and the classes of the objects in it to be importable here."
    )


def _objects_in(source: Path) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(source))
    except Exception:  # there are no names to tell
        return []


def is_archive(path: Any) -> bool:
    """Whether a file begins as those of `torch.save` do."""
    with opened(path) as file:
        return bool(file.read(len(_ARCHIVE)) == _ARCHIVE)


def verify_file(path: Any) -> bool:
    """Compare a file of `torch.save` with its checksums; return whether it has any."""
    if not is_archive(path):
        return False
    with _local_copy(path) as (_, file):
        _check(path, file)
    return True
