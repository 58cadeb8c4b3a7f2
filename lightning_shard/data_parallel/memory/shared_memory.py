"""Tensors that share a parameter's memory without being it: no rank could keep them tied.

b.weight = a.weight              one parameter in two places: tied, as everywhere
b.weight.data = a.weight.data    two parameters on one memory: a step on one device moves both
self.first = a.weight.data[0]    a tensor that follows the parameter on one device
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lightning_shard.data_parallel.torch_private import OF_ORIGINAL, storage_key
from lightning_shard.errors import ConfigError

K = TypeVar("K")


def refuse_shared_memory(model: nn.Module, rank: int) -> None:
    """Raise ConfigError if a parameter of a model has elements in the memory of something else."""
    params = {
        name: param.data
        for name, param in model.named_parameters()
        if not isinstance(param, UninitializedParameter)
    }
    others = dict(_other_tensors(model))
    for (first, _), (second, _) in overlapping([*params.items(), *others.items()]):
        if first in params and second in params:
            raise ConfigError(
                f"Rank {rank}: the parameters {first!r} and {second!r} of {type(model).__name__} "
                f"share memory without being one parameter, as after b.data = a.data, so that the "
                f"ranks would untie them; expected memory of their own, or one parameter in both "
                f"places. Tie them by it: b.weight = a.weight."
            )
        if first in params or second in params:
            param, other = (first, second) if first in params else (second, first)
            raise ConfigError(
                f"Rank {rank}: {other!r} of {type(model).__name__} shares memory with the "
                f"parameter {param!r}, and would not follow it on the ranks, which keep parameters "
                f"in memory of their own; expected a tensor of its own. Keep a copy, "
                f"weight.detach().clone(), or read the parameter where the tensor is used."
            )


def _other_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers and the tensors that modules keep as attributes, also in lists there."""
    yield from ((name, one) for name, one in model.named_buffers() if _is_plain(one))
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or name + OF_ORIGINAL in module._parameters:
                continue  # torch's own, and what `spectral_norm` and `prune` compute anew
            for index, one in enumerate(_listed(value)):
                if _is_plain(one):
                    yield f"{path}.{name}[{index}]".lstrip("."), one.detach()


def _is_plain(value: Any) -> bool:
    return type(value) is Tensor and value.layout is torch.strided and not value.is_nested


def _listed(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else [value]


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
