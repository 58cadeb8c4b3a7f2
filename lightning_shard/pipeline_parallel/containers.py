"""What batches and results hold: values of mappings, lists, tuples and dataclasses; digests."""

import copy
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

_SAMPLES = 1 << 16  # elements of a tensor that are digested, evenly spaced


def held_values(container: Any) -> dict[Any, Any] | None:
    """Return the values of a mapping, list, tuple or dataclass by key; None for anything else."""
    if isinstance(container, Mapping):
        return dict(container.items())
    if isinstance(container, list | tuple):
        return dict(enumerate(container))
    if is_dataclass(container) and not isinstance(container, type):
        return {field.name: getattr(container, field.name) for field in fields(container)}
    return None


def with_values(container: Any, values: dict[Any, Any]) -> Any:
    """Return a copy of `container` that holds `values`, by the keys of `held_values`."""
    if isinstance(container, list | tuple):
        is_named = hasattr(container, "_fields")
        return type(container)(*values.values()) if is_named else type(container)(values.values())
    copied = copy.copy(container)
    for key, value in values.items():
        if isinstance(container, Mapping):
            copied[key] = value
        else:
            object.__setattr__(copied, key, value)  # the dataclass may be frozen
    return copied


def is_sequence(value: Any) -> bool:
    """Whether `value` may hold one value per sample; a named tuple holds fields."""
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def held_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value that have a dimension, in order."""
    if isinstance(value, Tensor) and value.ndim:
        yield value
    for one in (held_values(value) or {}).values():
        yield from held_tensors(one)


def digest(batch: Any) -> int:
    """Return a checksum of the content of a batch, the same in every process."""
    checksum = 0

    def add(value: Any) -> Any:
        nonlocal checksum
        for part in _bytes_of(value):
            checksum = zlib.crc32(part, checksum)
        return value

    apply_to_collection(batch, (Tensor, np.ndarray, str, bytes, int, float), add)
    return checksum


def _bytes_of(value: Any) -> list[bytes]:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, Tensor):
        return [repr(value).encode()]
    shape = repr((tuple(value.shape), value.dtype)).encode()
    if value.layout != torch.strided:
        return [shape]
    flat = value.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLES)].cpu()
    some = some.clone(memory_format=torch.contiguous_format)  # one element may have any stride
    return [shape, some.view(torch.uint8).numpy().tobytes()]
