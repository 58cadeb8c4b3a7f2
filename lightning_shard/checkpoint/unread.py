"""A tensor of a checkpoint whose elements are read when they are written elsewhere, not before."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_shard.backends.packing import bits_of


class Unread(Protocol):
    """A tensor of which nothing has been read."""

    @property
    def shape(self) -> torch.Size:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Its format."""

    def read(self) -> Tensor:
        """Read it: contiguous, on the CPU, the reader's own."""


@dataclass(frozen=True, eq=False)
class MadeWhenRead:
    """A tensor that is in memory anyway, or made of others, when it is read."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]


def is_unread(value: Any) -> bool:
    """Whether a value in nested containers stands for a tensor."""
    return hasattr(value, "read") and isinstance(getattr(value, "dtype", None), torch.dtype)


def bytes_in(tensor: Unread) -> int:
    """Return the number of its bytes."""
    return tensor.shape.numel() * tensor.dtype.itemsize


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    elements: Any = bits_of(tensor).numpy()
    return memoryview(elements)


def tensors_in(nested: Any) -> Iterator[Unread]:
    """Yield the tensors of nested mappings, lists and tuples."""
    if is_unread(nested):
        yield nested
    elif isinstance(nested, Mapping):
        for child in nested.values():
            yield from tensors_in(child)
    elif isinstance(nested, (list, tuple)):
        for child in nested:
            yield from tensors_in(child)


def has_unread(nested: Any) -> bool:
    """Whether nested mappings, lists and tuples have tensors that were not read."""
    return next(tensors_in(nested), None) is not None


def exchanged(
    nested: Any, exchange: Callable[[Any], Any], is_one: Callable[[Any], bool] = is_unread
) -> Any:
    """Return nested containers with something else for unread tensors; without any, as they are."""
    if is_one(nested):
        return exchange(nested)
    if isinstance(nested, Mapping):
        found = {key: exchanged(value, exchange, is_one) for key, value in nested.items()}
        return like(nested, found) if _differ(found.values(), nested.values()) else nested
    if isinstance(nested, (list, tuple)):
        children = [exchanged(value, exchange, is_one) for value in nested]
        if not _differ(children, nested):
            return nested
        return tuple(children) if isinstance(nested, tuple) else children
    return nested


def present(nested: Any) -> Any:
    """Return nested containers with what is unread in the place of each tensor in memory."""

    def unread(tensor: Tensor) -> MadeWhenRead:
        return MadeWhenRead(tensor.shape, tensor.dtype, lambda: tensor.detach().cpu().contiguous())

    return exchanged(
        nested, unread, lambda one: isinstance(one, Tensor) and one.layout == torch.strided
    )


def like(nested: Mapping[Any, Any], entries: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return entries as torch's own mapping, which knows module versions, if `nested` is one."""
    if not isinstance(nested, OrderedDict):
        return dict(entries)
    made = OrderedDict(entries)
    vars(made).update(vars(nested))
    return made


def _differ(some: Any, others: Any) -> bool:
    return any(one is not other for one, other in zip(some, others, strict=True))
