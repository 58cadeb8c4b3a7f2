"""Rules of what comes after the blocks: losses and sums of a sequence in parts.

    logits (B, S/W, V) ──own targets──> sum of own losses ──all-reduce──> / count      the loss

Labels are full on each rank, and what is counted of them is counted there. Logits that are shifted
against their labels lose their last positions, which become padding: nothing is sent.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_shard.context_parallel.crossings import total
from lightning_shard.context_parallel.sequence_part import RULES, SequencePart, part_of
from lightning_shard.tensor_parallel import dim_sharded_operations as operations
from lightning_shard.tensor_parallel import dim_sharded_shapes as shapes
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor, wrapped


def _loss(
    func: Any,
    input: Any,  # noqa: A002 - torch's name
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    **options: Any,
) -> Any:
    """Do cross_entropy or nll_loss with each rank's rows."""
    part = part_of(input)
    is_legacy = size_average is not None or reduce is not None
    if part is None or is_legacy or isinstance(target, DimShardedTensor):
        return NotImplemented
    if target.is_floating_point() or part.local.ndim < 2 or part.dim == 1:
        return NotImplemented  # each row has all classes elsewhere
    dim = max(part.dim - 1, 0)
    if target.shape != (*input.shape[:1], *input.shape[2:]):
        return NotImplemented
    options |= {"weight": weight, "ignore_index": ignore_index}
    own = part.own_filled(target, dim, ignore_index)
    if reduction == "none":
        return part.widen(func(part.local, own, reduction="none", **options), dim)
    if reduction not in ("mean", "sum"):
        return NotImplemented
    result = total(func(part.local, own, reduction="sum", **options), part.group)
    return result if reduction == "sum" else result / _count(target, weight, ignore_index)


def _count(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return weight[target.masked_fill(~counted, 0)].mul(counted).sum()


def _sum(func: Any, sharded: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Sum or average, also over positions: of what each rank has of them."""
    part = part_of(sharded)
    dims = list(dim) if isinstance(dim, tuple | list) else [dim]
    if part is None or (dim is not None and not all(type(one) is int for one in dims)):
        return operations.reduced(func, sharded, dim, *args, **kwargs)
    ndim = part.local.ndim
    places = range(ndim) if dim is None or not dims else {one % ndim for one in dims}
    if part.dim not in places:
        return operations.reduced(func, sharded, dim, *args, **kwargs)
    is_kept = args[0] if args else kwargs.get("keepdim", False)
    if not (part.local.is_floating_point() and sharded.numel()) or len(args) > 1:
        return NotImplemented
    if set(kwargs) - {"dtype", "keepdim"} or "out" in kwargs:
        return NotImplemented
    result = _total_over(part, sorted(places), keeps=bool(is_kept), dtype=kwargs.get("dtype"))
    count = math.prod(part.full_shape[one] for one in places)
    return result / count if func.__name__ == "mean" else result


def _total_over(
    part: SequencePart, places: Sequence[int], *, keeps: bool, dtype: torch.dtype | None
) -> Tensor:
    """Sum over dimensions, that of positions among them; `own_positions` has one more."""
    own = part.own_positions()
    shifted = [one + (one > part.dim) for one in places] + [part.dim + 1]
    summed = own.sum(shifted, keepdim=keeps, dtype=dtype)
    return total(summed.squeeze(part.dim + 1) if keeps else summed, part.group)


def _elementwise_loss(
    func: Any,
    input: Any,  # noqa: A002
    target: Any,
    *args: Any,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    **options: Any,
) -> Any:
    """Do a loss that compares two tensors element by element."""
    part = part_of(input) or part_of(target)
    is_legacy = size_average is not None or reduce is not None
    if part is None or args or is_legacy or tuple(input.shape) != tuple(target.shape):
        return NotImplemented
    if options.get("weight") is not None and not func.__name__.startswith("binary"):
        return NotImplemented  # a mean by weight
    own = [part.operand(input), part.operand(target)]
    options = {name: part.operand(one) for name, one in options.items()}
    if any(one is NotImplemented for one in (*own, *options.values())):
        return NotImplemented
    result = part.widen(func(*own, reduction="none", **options), part.dim)
    if reduction == "none":
        return result
    if reduction not in ("mean", "sum", "batchmean"):
        return NotImplemented
    whole = result.sum()
    return whole / {"mean": result.numel(), "sum": 1, "batchmean": input.shape[0]}[reduction]


def _getitem(func: Any, sharded: Any, index: Any) -> Any:
    """Index; positions before one in the second half are the part with more padding."""
    part = part_of(sharded)
    entries = list(index) if isinstance(index, tuple) else [index]
    place = None if part is None else _entry_of(part, entries)
    if part is None or place is None:
        return shapes.getitem(func, sharded, index)
    start, stop, step = entries[place].indices(part.width)
    if (start, step) != (0, 1) or part.num_blocks > 1 or not part.width // 2 < stop < part.width:
        return shapes.getitem(func, sharded, index)
    entries[place] = slice(None)
    return _shortened(shapes.getitem(func, sharded, tuple(entries)), part.width - stop)


def _narrow(func: Any, sharded: Any, dim: int, start: Any, length: int) -> Any:
    part = part_of(sharded)
    is_of_sequence = part is not None and dim % sharded.ndim == part.dim
    if not is_of_sequence or not isinstance(start, int):
        return shapes.narrow(func, sharded, dim, start, length)
    index = [slice(None)] * sharded.ndim
    index[dim % sharded.ndim] = slice(start, start + length)
    return _getitem(Tensor.__getitem__, sharded, tuple(index))


def _entry_of(part: SequencePart, entries: list[Any]) -> int | None:
    """Return the place of the sequence's slice among an index's entries, if it has one."""
    if any(one is None or isinstance(one, bool | Tensor | list) for one in entries):
        return None
    if any(one is Ellipsis for one in entries):
        gap = next(i for i, one in enumerate(entries) if one is Ellipsis)
        missing = part.local.ndim - len(entries) + 1
        entries[gap : gap + 1] = [slice(None)] * missing
    place = part.dim
    return place if place < len(entries) and isinstance(entries[place], slice) else None


def _shortened(sharded: Any, by: int) -> Any:
    if sharded is NotImplemented:
        return sharded
    part = sharded.part
    return wrapped(replace(part, padding=part.padding + by))


_ELEMENTWISE = (
    "mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss poisson_nll_loss "
    "binary_cross_entropy binary_cross_entropy_with_logits"
)
RULES.update(
    cross_entropy=_loss,
    nll_loss=_loss,
    sum=_sum,
    mean=_sum,
    __getitem__=_getitem,
    narrow=_narrow,
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise_loss),
)
assert functional.cross_entropy.__name__ in RULES
assert torch.nn.functional.nll_loss.__name__ in RULES
