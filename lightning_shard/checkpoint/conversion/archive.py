"""A file of `torch.save`, whose tensors are read one by one; no code of it is run.

The pickle is read with something inert in the place of every class that it names, so that a file
whose classes cannot be imported, or are not trusted, still tells its tensors. What torch calls to
make a tensor again is private: `tests/checkpoint/conversion` fails when it changes.
"""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from math import prod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.checkpoint.files.places import remote_place
from lightning_shard.errors import CheckpointError

_LOCAL_HEADER_BYTES = 30
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


class Opaque(dict[Any, Any]):
    """Stands for an object of another class: its entries where it is a mapping, else nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

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


class RecordTensor:
    """A tensor whose elements lie in a record of an archive.

    Args:
        archive: The archive that holds the record.
        record: Number of the record that holds the storage, as text.
        dtype: The tensor's format.
        start: Where in the storage it begins, in elements.
        shape: Shape of the tensor.
        stride: Strides of the tensor, in elements.
    """

    def __init__(
        self,
        archive: "ArchiveFile",
        record: str,
        dtype: torch.dtype,
        start: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> None:
        self._archive, self._record = archive, record
        self._start, self._stride = start, stride
        self.shape, self.dtype = torch.Size(shape), dtype

    def read(self) -> Tensor:
        """Read the elements, and those between them where the tensor is strided."""
        if not prod(self.shape):
            return torch.empty(self.shape, dtype=self.dtype)
        pairs = zip(self.shape, self._stride, strict=True)
        length = 1 + sum((size - 1) * stride for size, stride in pairs)
        size = self.dtype.itemsize
        content = self._archive.read(self._record, self._start * size, length * size)
        flat = torch.frombuffer(content, dtype=torch.uint8).view(self.dtype)
        return flat.as_strided(self.shape, self._stride).contiguous()


class ArchiveFile:
    """A file of `torch.save`, opened.

    Args:
        path: Local, or any path of fsspec's.

    Attributes:
        content: What was saved, with unread tensors, and `Opaque` in the place of other objects.
        has_objects: Whether there are any of these.

    Raises:
        CheckpointError: It is damaged, or of another kind.
    """

    def __init__(self, path: Any) -> None:
        self._path = path
        self._filesystem, self._inner = remote_place(path)
        self._known: dict[Any, RecordTensor] = {}
        self.has_objects = False
        try:
            with self._filesystem.open(self._inner, "rb") as file, zipfile.ZipFile(file) as archive:
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
        place = (record, dtype, start, tuple(shape), tuple(stride))
        if place not in self._known:
            self._known[place] = RecordTensor(self, *place)
        return self._known[place]

    def read(self, record: str, start: int, length: int) -> bytearray:
        """Read bytes of the record of a storage.

        Raises:
            CheckpointError: They are not there.
        """
        info = self._records.get(f"{self._folder}/data/{record}")
        content = bytearray(length)
        try:
            if info is None or start + length > info.file_size or info.compress_type:
                raise ValueError(f"there are no {length} bytes from {start} on")
            with self._filesystem.open(self._inner, "rb") as file:
                file.seek(info.header_offset)
                names = struct.unpack_from("<2H", file.read(_LOCAL_HEADER_BYTES), 26)
                file.seek(info.header_offset + _LOCAL_HEADER_BYTES + sum(names) + start)
                if file.readinto(content) != length:
                    raise ValueError("the file ends in them")
        except (OSError, ValueError, struct.error) as error:
            raise self._damaged(error, f"the record data/{record}") from error
        return content

    def _damaged(self, error: Exception, what: str = "its list of tensors") -> CheckpointError:
        return CheckpointError(
            f"{self._path} is damaged, or no file of torch.save: {what} cannot be read ({error}). "
            f"Load another checkpoint, or copy this one again from where it is whole."
        )


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
        return str(record), dtype

    def rebuilt(self, storage: Any, start: int, shape: Any, stride: Any, *_: Any) -> Any:
        return self._archive.tensor(storage, start, shape, stride)

    def rebuilt_of_bytes(
        self,
        storage: Any,
        start: int,
        shape: Any,
        stride: Any,
        _: Any,
        __: Any,
        dtype: Any,
        *___: Any,
    ) -> Any:
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
