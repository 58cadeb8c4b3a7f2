"""Rules of operations along dimensions that are not cut: each rank does its own positions.

    topk, sort, cumsum, norm, var, glu ...     along features or heads
    pad, conv1d                                where no position needs its neighbours
    gather, scatter, cat, stack                of tensors that are cut alike, or can be
    zeros_like, rand_like ...                  full, as nobody needs other positions for them

Along the sequence itself they are computed on the gathered one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_shard.context_parallel.sequence_part import RULES, SequencePart, part_of
from lightning_shard.tensor_parallel import dim_sharded_shapes as shapes
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor
from lightning_shard.tensor_parallel.full_width_attention import combined

_FIRST = "amax amin max min argmax argmin std var std_mean var_mean logsumexp prod any all median "
_FIRST += "nansum nanmean nanmedian count_nonzero flip softmin cumsum cumprod cummax cummin "
_FIRST += "logcumsumexp mode sort argsort glu"
_SECOND = "topk kthvalue roll normalize norm tensor_split linalg_vector_norm linalg_norm diff"
_PLACE_OF_DIM = dict.fromkeys(_FIRST.split(), 0) | dict.fromkeys(_SECOND.split(), 1)
_DEFAULT_DIM = dict.fromkeys(["sort", "argsort", "glu", "topk", "kthvalue", "mode", "diff"], -1)
_DEFAULT_DIM |= {"normalize": 1, "tensor_split": 0}


def _along(func: Any, sharded: Any, *args: Any, **kwargs: Any) -> Any:
    """Do an operation along dimensions of which this rank has all entries."""
    part = part_of(sharded)
    given = [*args, *kwargs.values()]
    if part is None or kwargs.get("out") is not None:
        return NotImplemented
    if any(isinstance(one, Tensor) for one in given):  # the larger one of two tensors, say
        return NotImplemented if kwargs else combined(func, sharded, (sharded, *args), {})
    dims = _dims(func.__name__, args, kwargs)
    if not dims or part.dim in {one % part.local.ndim for one in dims}:
        return NotImplemented
    return _widened(part, func(part.local, *args, **kwargs), [d % part.local.ndim for d in dims])


def _dims(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """Return the dimensions that an operation goes along; none where it is all of them."""
    place = _PLACE_OF_DIM[name]
    named = [kwargs[one] for one in ("dim", "dims", "axis") if kwargs.get(one) is not None]
    found = named or list(args[place : None if name == "flip" else place + 1])
    found = found or [_DEFAULT_DIM.get(name)]
    flat = [one for some in found for one in (some if isinstance(some, tuple | list) else [some])]
    return flat if all(type(one) is int for one in flat) else []


def _widened(part: SequencePart, result: Any, dims: Sequence[int]) -> Any:
    if isinstance(result, Tensor):
        is_kept = result.ndim == part.local.ndim
        return part.widen(result, part.dim - (0 if is_kept else sum(d < part.dim for d in dims)))
    both = [_widened(part, one, dims) for one in result]
    return tuple(both) if type(result) in (tuple, list) else type(result)(both)


def _pad(
    func: Any,
    input: Any,  # noqa: A002 - torch's name
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Any:
    """Pad other dimensions."""
    part = part_of(input)
    if part is None or any(pad[2 * (part.place - 1) : 2 * part.place]):
        return NotImplemented
    return part.widen(func(part.local, pad, mode=mode, value=value))


def _conv1d(
    func: Any,
    input: Any,  # noqa: A002
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Do a convolution that looks at one position at a time."""
    part = part_of(input)
    alone = tuple(_one(each) for each in (stride, padding)) == (1, 0) or padding in (
        "valid",
        "same",
    )
    if part is None or part.place != 1 or not alone or _one(stride) != 1:
        return NotImplemented
    if isinstance(weight, DimShardedTensor) or weight.shape[-1] != 1:
        return NotImplemented
    own = part.shared(weight), part.shared(bias), stride, padding, dilation, groups
    return part.widen(func(part.local, *own))


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, tuple | list) else value


def _by_index(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Gather or scatter along a dimension that is not cut, by indices of the own positions."""
    target, dim, index, *rest = args if not kwargs else _in_order(args, kwargs)
    like = next((part_of(one) for one in (target, index, *rest) if part_of(one) is not None), None)
    if like is None or not isinstance(dim, int) or not isinstance(index, Tensor):
        return NotImplemented
    tensors = [one for one in (target, index, *rest) if isinstance(one, Tensor) and one.ndim]
    is_even = len({(one.ndim, one.shape[like.dim]) for one in tensors}) == 1
    if dim % like.local.ndim == like.dim or not is_even:
        return NotImplemented
    own = [like.operand(one) for one in (target, index, *rest)]
    if any(one is NotImplemented for one in own):
        return NotImplemented
    return like.widen(func(own[0], dim, *own[1:]))


def _in_order(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    names = ("dim", "index", "src" if "src" in kwargs else "value")[len(args) - 1 :]
    if set(kwargs) - set(names):
        return [None, None, None]
    return [*args, *(kwargs[name] for name in names if name in kwargs)]


def _take_along(func: Any, sharded: Any, indices: Any, dim: Any = None) -> Any:
    return _by_index(lambda one, dim, at: func(one, at, dim), sharded, dim, indices)


def _like(func: Any, sharded: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a full tensor like one that is cut: random numbers are those of a single device."""
    part = part_of(sharded)
    return NotImplemented if part is None else func(_of_shape(part), *args, **kwargs)


def _of_shape(part: SequencePart) -> Tensor:
    return part.local.detach().new_empty(()).expand(tuple(part.full_shape))


def _joined(func: Any, tensors: Any, dim: int = 0) -> Any:
    """Concatenate or stack along another dimension; tensors that are full are cut."""
    is_stack = func.__name__ == "stack"
    # torch passes over a cache that is empty yet
    given = [one for one in tensors if part_of(one) is not None or tuple(one.shape) != (0,)]
    part = next((part_of(one) for one in given if part_of(one) is not None), None)
    if part is None:
        return NotImplemented
    if len(given) == 1 and not is_stack:
        return part.widen(func([part.local], dim))
    place = dim % (part.local.ndim + is_stack)
    if (place == part.dim and not is_stack) or any(one.ndim != part.local.ndim for one in given):
        return NotImplemented
    own = [
        part.split(one, part.dim) if _can_be_cut(one, part) else part.operand(one) for one in given
    ]
    if any(one is NotImplemented or one.shape[part.dim] != own[0].shape[part.dim] for one in own):
        return NotImplemented
    return part.widen(func(own, dim), part.dim + (is_stack and place <= part.dim))


def _can_be_cut(value: Tensor, part: SequencePart) -> bool:
    return not isinstance(value, DimShardedTensor) and value.shape[part.dim] == part.width


def _triangle(func: Any, sharded: Any, diagonal: int = 0) -> Any:
    """Keep a triangle of a matrix whose rows, or columns, are cut."""
    part = part_of(sharded)
    if part is None or part.num_blocks > 1:
        return NotImplemented
    first = part.group.rank * part.local.shape[part.dim]
    shift = {1: -first, 2: first}.get(part.place, 0)
    return part.widen(func(part.local, diagonal + shift))


def _prelu(func: Any, input: Any, weight: Any) -> Any:  # noqa: A002
    part = part_of(input)
    if part is None or weight.numel() != 1 or isinstance(weight, DimShardedTensor):
        return NotImplemented
    return part.widen(func(part.local, part.shared(weight)))


def _view_as(func: Any, sharded: Any, other: Tensor) -> Any:
    if part_of(sharded) is None:
        return func(sharded, _shaped(other))
    return shapes.view(Tensor.reshape, sharded, tuple(other.shape))


def _expand_as(func: Any, tensor: Any, other: Tensor) -> Any:
    return tensor.expand(other.shape) if part_of(tensor) else func(tensor, _shaped(other))


def _shaped(other: Tensor) -> Tensor:
    """Return a tensor of a shape, for functions that look at nothing else."""
    return torch.empty((), device=other.device, dtype=other.dtype).expand(tuple(other.shape))


def _named(rule: Callable[..., Any], names: str) -> dict[str, Callable[..., Any]]:
    return dict.fromkeys(names.split(), rule)


RULES.update(
    pad=_pad,
    conv1d=_conv1d,
    prelu=_prelu,
    take_along_dim=_take_along,
    **dict.fromkeys(_PLACE_OF_DIM, _along),
    **_named(_by_index, "gather scatter scatter_add"),
    **_named(_like, "zeros_like ones_like full_like empty_like rand_like randn_like randint_like"),
    **_named(_joined, "cat concat stack"),
    **_named(_triangle, "tril triu"),
    **_named(_view_as, "view_as reshape_as"),
    expand_as=_expand_as,
)
assert functional.normalize.__name__ in RULES
assert torch.topk.__name__ in RULES
