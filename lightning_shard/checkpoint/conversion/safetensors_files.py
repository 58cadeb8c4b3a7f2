"""Files of safetensors: a header with the place of each tensor, then their elements.

    ┌ 8 bytes ──────┬ JSON ────────────────────────────────────┬ elements, row by row ┐
      header's length  {"w": {"dtype": "F32", "shape": [2, 3],   little-endian, no gaps
                        "data_offsets": [0, 24]}, ...}

A file is written one tensor at a time, and read so from any filesystem of fsspec's. The package
`safetensors` can do neither: `save_file` takes all tensors of a file at once (384 MB for three of
134 MB from a folder, 140 MB here), and `safe_open` a local path; torch's `HuggingFaceStorageWriter`
holds each file twice.

Source:
    https://huggingface.co/docs/safetensors, "Format".
"""

import json
import struct
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_shard.checkpoint.files.places import opened, remote_place
from lightning_shard.checkpoint.unread import Unread, bytes_in, memory_of
from lightning_shard.errors import CheckpointError

_ALIGNMENT = 8
_LONGEST_HEADER = 100_000_000  # what other readers take
_NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPES = {dtype: name for name, dtype in _NAMES.items()}


class SliceTensor:
    """A tensor in a file of safetensors."""

    def __init__(self, path: Any, dtype: torch.dtype, shape: Any, start: int) -> None:
        self._path, self._start = path, start
        self.shape, self.dtype = torch.Size(shape), dtype

    def read(self) -> Tensor:
        """Read it."""
        if not prod(self.shape):
            return torch.empty(self.shape, dtype=self.dtype)
        content = bytearray(bytes_in(self))
        try:
            with opened(self._path) as file:
                file.seek(self._start)
                if file.readinto(content) != len(content):
                    raise OSError("the file ends in a tensor")
        except OSError as error:
            raise _damaged(self._path, str(error)) from error
        return torch.frombuffer(content, dtype=torch.uint8).view(self.dtype).view(self.shape)


def write_safetensors(
    file: BinaryIO, tensors: Mapping[str, Unread], written: Callable[[int], None]
) -> None:
    """Write a file, one tensor at a time; `written` is told the bytes of each."""
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # so all are aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, end = end, end + bytes_in(tensors[name])
        header[name] = {
            "dtype": _DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(struct.pack("<Q", len(text)) + text)
    for name in order:
        file.write(memory_of(tensors[name].read()))
        written(bytes_in(tensors[name]))


def check_formats(tensors: Mapping[str, Unread]) -> None:
    """Raise if a tensor has a format that safetensors does not know."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{name!r} is of {tensor.dtype}, expected one of {', '.join(_NAMES)}, which "
                f"safetensors knows. Give --dtype, or write a .pt file."
            )


def read_safetensors(path: Any) -> dict[str, SliceTensor]:
    """Return the tensors of a file by name; none is read."""
    filesystem, inner = remote_place(path)
    try:
        with filesystem.open(inner, "rb") as file:
            size = filesystem.size(inner)
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_LONGEST_HEADER, size - 8):
                raise ValueError(f"its header of {length} bytes does not fit into {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = {name: _slice(path, one, 8 + length) for name, one in header.items()}
        _check_offsets(header, size - 8 - length)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise _damaged(path, str(error)) from error
    return found


def _slice(path: Any, told: Mapping[str, Any], base: int) -> SliceTensor:
    begin, end = told["data_offsets"]
    dtype = _NAMES.get(told["dtype"])
    if dtype is None:
        raise ValueError(f"it holds a tensor of {told['dtype']}, which is not known here")
    tensor = SliceTensor(path, dtype, told["shape"], base + begin)
    if end - begin != bytes_in(tensor):
        raise ValueError(f"a tensor of {told['shape']} has {end - begin} bytes")
    return tensor


def _check_offsets(header: Mapping[str, Any], size: int) -> None:
    """Elements must fill the file without gaps, in some order."""
    at = 0
    for begin, end in sorted(tuple(one["data_offsets"]) for one in header.values()):
        if begin != at:
            raise ValueError(f"nothing lies between its bytes {at} and {begin}")
        at = end
    if at != size:
        raise ValueError(f"its tensors have {at} bytes, but {size} are there")


def _damaged(path: Any, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged, or no file of safetensors: {reason}. Copy it again from where it is "
        f"whole."
    )
