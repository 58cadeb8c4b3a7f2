"""The tensors in what a module is called with or returns: tuples, lists, mappings, dataclasses."""

from collections.abc import Callable
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


def tensors_in(value: Any) -> list[Tensor]:
    """Return every tensor in a nested value, in a fixed order."""
    found: list[Tensor] = []
    apply_to_collection(value, Tensor, found.append)
    return found


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a nested value with each of its tensors exchanged."""
    return apply_to_collection(value, Tensor, function)


def signature(value: Any) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Return the shapes and formats of a nested value's tensors."""
    return tuple((tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors_in(value))
