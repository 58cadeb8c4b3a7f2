"""The tensors in a module's arguments and results: tuples, lists, mappings, dataclasses."""

import operator
from collections.abc import Callable, MutableMapping
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_shard.pipeline_parallel.containers import held_values, with_values

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
    elif kind not in _PLAIN:
        apply_to_collection(value, Tensor, found.append)


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


def signature(value: Any) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Return the shapes and formats of a nested value's tensors."""
    return tuple((tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors_in(value))
