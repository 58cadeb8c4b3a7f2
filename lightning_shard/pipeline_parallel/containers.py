"""What batches and results hold: values of mappings, lists, tuples and dataclasses; digests."""

import copy
import io
import operator
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

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
    if isinstance(container, MappingProxyType):
        return MappingProxyType(values)
    copied = copy.copy(container)
    sizes = getattr(copied, "batch_size", None)
    if isinstance(sizes, torch.Size):  # of a TensorDict: the first sizes of all its values
        copied.batch_size = []
        shapes = [one.shape for one in held_tensors(list(values.values()))]
        rows = shapes[0][: len(sizes)] if shapes else sizes
    for key, value in values.items():
        if isinstance(container, Mapping):
            copied[key] = value
        else:
            object.__setattr__(copied, key, value)  # the dataclass may be frozen
    if isinstance(sizes, torch.Size):
        copied.batch_size = rows
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


def opened(batch: Any) -> tuple[Any, list[Tensor]]:
    """Return a batch beside the tensors in its objects of other classes, such as graphs.

    Pickle finds them, as it would to send the batch from a loader's worker.
    """
    found: list[Tensor] = []
    for one in _others(batch):
        finder = _TensorFinder(io.BytesIO(), 5, buffer_callback=lambda _: False)
        with suppress(Exception):  # the object's own: it cannot be sent, and nothing is known of it
            finder.dump(one)
            found += finder.found
    return batch, found


class _TensorFinder(pickle.Pickler):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.found: list[Tensor] = []

    @override
    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self.found.append(value)
        return len(self.found)


def _others(value: Any) -> Iterator[Any]:
    held = held_values(value)
    if held is None and type(value) not in _PLAIN and not isinstance(value, Tensor | np.ndarray):
        yield value
    for one in (held or {}).values():
        yield from _others(one)


def digest(batch: Any) -> int:
    """Return a checksum of the content of a batch, the same in every process."""
    checksum = 0

    def add(value: Any) -> Any:
        nonlocal checksum
        for part in _bytes_of(value):
            checksum = zlib.crc32(part, checksum)
        return value

    apply_to_collection(opened(batch), (Tensor, np.ndarray, str, bytes, int, float), add)
    return checksum


def _bytes_of(value: Any) -> list[bytes]:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, Tensor):
        return [repr(value).encode()]
    shape = repr((_shape(value), value.dtype)).encode()
    if value.is_nested:
        return [shape, *(part for one in value.unbind() for part in _bytes_of(one))]
    if value.is_sparse or value.is_sparse_csr:
        held = value.to_sparse().coalesce()
        return [shape, *_bytes_of(held.indices()), *_bytes_of(held.values())]
    if value.layout != torch.strided:
        return [shape]
    flat = value.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLES)].cpu()
    some = some.clone(memory_format=torch.contiguous_format)  # one element may have any stride
    return [shape, some.view(torch.uint8).numpy().tobytes()]


_PLAIN = {type(None), bool, int, float, str}


def tensors_in(value: Any) -> list[Tensor]:
    """Return every tensor in a nested value, in a fixed order."""
    found: list[Tensor] = []
    _find(value, found)
    return found


def _find(value: Any, found: list[Tensor]) -> None:
    kind = type(value)
    if isinstance(value, Tensor):
        found.append(value)
    elif kind is tuple or kind is list:  # `apply_to_collection` takes several times as long
        for one in value:
            _find(one, found)
    elif kind is dict:
        for one in value.values():
            _find(one, found)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for one in value:
            _find(one, found)
    elif kind not in _PLAIN:
        for one in (held_values(value) or {}).values():
            _find(one, found)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested value with `function` applied to each of its tensors."""
    return apply_to_collection(value, Tensor, function)


def exchange_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Replace each tensor of a nested value in place, in the same lists and mappings.

    So the caller sees what a module appends to a list that it is called with.
    """
    if isinstance(value, Tensor):
        return function(value)
    if type(value) is tuple:  # most of what blocks are called with: the short way
        elements = tuple([exchange_tensors(one, function) for one in value])
        return value if all(map(operator.is_, elements, value)) else elements
    if type(value) in _PLAIN:
        return value
    held = held_values(value)
    if held is None:
        return value
    exchanged = {key: exchange_tensors(one, function) for key, one in held.items()}
    if all(exchanged[key] is one for key, one in held.items()):
        return value
    if not isinstance(value, list | MutableMapping):
        return with_values(value, exchanged)
    for key, one in exchanged.items():
        value[key] = one
    return value


def signature(value: Any) -> tuple[tuple[tuple[Any, ...], str], ...]:
    """Return the shapes and formats of a nested value's tensors."""
    return tuple((_shape(tensor), str(tensor.dtype)) for tensor in tensors_in(value))


def _shape(tensor: Tensor) -> tuple[Any, ...]:
    """Return a tensor's shape, of a nested one those of its parts."""
    return tuple(map(_shape, tensor.unbind()) if tensor.is_nested else tensor.shape)
