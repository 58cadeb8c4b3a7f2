"""Parameters that share memory without being one parameter: no rank could keep them tied.

    b.weight = a.weight              one parameter in two places: tied, as everywhere
    b.weight.data = a.weight.data    two parameters on one memory: a step on one device moves both

Flat buffers have a place for each parameter, so that the second kind would come apart in silence.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lightning_shard.data_parallel.torch_private import storage_key
from lightning_shard.errors import ConfigError

K = TypeVar("K")


def refuse_shared_memory(model: nn.Module, rank: int) -> None:
    """Raise ConfigError if two parameters of a model have elements in the same memory.

    Args:
        model: The model, as the user has built it.
        rank: Global rank of this process, for the message.
    """
    named = [
        (name, param.data)
        for name, param in model.named_parameters()
        if not isinstance(param, UninitializedParameter)
    ]
    for (first, _), (second, _) in overlapping(named):
        raise ConfigError(
            f"Rank {rank}: the parameters {first!r} and {second!r} of {type(model).__name__} "
            f"share memory without being one parameter, as after b.data = a.data, so that the "
            f"ranks would untie them; expected memory of their own, or one parameter in both "
            f"places. Tie them by it: b.weight = a.weight."
        )


def overlapping(
    tensors: Iterable[tuple[K, Tensor]],
) -> Iterator[tuple[tuple[K, Tensor], tuple[K, Tensor]]]:
    """Yield the pairs of tensors that have elements in common, each with what it is known by."""
    by_storage: dict[int, list[tuple[K, Tensor]]] = {}
    for key, tensor in tensors:
        if tensor.numel():
            by_storage.setdefault(storage_key(tensor), []).append((key, tensor))
    for sharing in by_storage.values():
        yield from _of_one_storage(sharing)


def _of_one_storage(
    sharing: Sequence[tuple[K, Tensor]],
) -> Iterator[tuple[tuple[K, Tensor], tuple[K, Tensor]]]:
    reaching: list[tuple[int, int, K, Tensor]] = []
    for place in sorted(((*_bounds(tensor), key, tensor) for key, tensor in sharing), key=_start):
        reaching = [one for one in reaching if one[1] > place[0]]
        for one in reaching:
            if _have_common(one[3], place[3]):
                yield one[2:], place[2:]
        reaching.append(place)


def _start(place: tuple[int, int, Any, Tensor]) -> int:
    return place[0]


def _bounds(tensor: Tensor) -> tuple[int, int]:
    """Return the first and one-past-last byte of a tensor in its storage."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    first, itemsize = int(tensor.storage_offset()), tensor.element_size()
    last = first + sum((size - 1) * stride for size, stride in steps)
    return first * itemsize, (last + 1) * itemsize


def _have_common(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have an element in common; they may lie between each other's rows."""
    if (one.is_contiguous() and other.is_contiguous()) or one.dtype is not other.dtype:
        return True
    numel = max(_bounds(one)[1], _bounds(other)[1]) // one.element_size()
    taken = torch.zeros(numel, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(value=True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())
