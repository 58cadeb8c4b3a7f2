"""Rules of the operations that work on parts of a sequence, beside those of any sharded tensor.

    (B, S/W, E) @ (E, F)             rows of this rank
    (B, H, S/W, D) @ (B, H, D, S)    own queries with all keys, which are gathered first

Along dimensions that are not cut (topk, sort, cumsum, pad, gather, cat ...) each rank does its own
positions; along the sequence itself they are computed on the gathered one.

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

from lightning_shard.context_parallel.crossings import total
from lightning_shard.context_parallel.sequence_part import RULES, SequencePart, part_of
from lightning_shard.core.tensor_calls import Kwargs
from lightning_shard.tensor_parallel import dim_sharded_shapes as shapes
from lightning_shard.tensor_parallel.dim_sharded_operations import (
    combined,
    elementwise,
    matmul,
    named,
    reduced,
)
from lightning_shard.tensor_parallel.dim_sharded_tensor import (
    DimShardedTensor,
    full_tensor,
    wrapped,
)


def _linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002
    part = part_of(input)
    if part is None or part.place == 1 or isinstance(weight, DimShardedTensor):
        return NotImplemented
    return part.widen(func(part.local, part.shared(weight), part.shared(bias)))


def _matmul(func: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """Multiply rows of this rank, or matrices of this rank."""
    if kwargs or min(left.ndim, right.ndim) < 2:
        return NotImplemented
    part, others = part_of(left), part_of(right)
    if part is not None and part.place == 2:
        full = part.full_operand(right)
        return full if full is NotImplemented else part.widen(func(part.local, full))
    if part is None and others is not None and others.place == 1:
        result = func(others.shared(full_tensor(left)), others.local)
        return others.widen(result, result.ndim - 1)
    return matmul(func, left, right)


def _baddbmm(
    func: Any,
    input: Any,  # noqa: A002
    batch1: Any,
    batch2: Any,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Any:
    """Multiply matrices, and add what broadcasts to the product."""
    product = _matmul(torch.bmm, batch1, batch2)
    if product is NotImplemented:
        return NotImplemented
    scaled = product if alpha == 1 else product * alpha
    return scaled if beta == 0 else scaled + (input if beta == 1 else input * beta)


def _addmm(func: Any, input: Any, mat1: Any, mat2: Any, **kwargs: Any) -> Any:  # noqa: A002
    part = part_of(mat1)
    if part is None or part.dim != 0 or input.ndim != 1 or isinstance(mat2, DimShardedTensor):
        return NotImplemented
    return part.widen(func(part.shared(input), part.local, part.shared(mat2), **kwargs))


_ELEMENTWISE = (
    "elu leaky_relu selu celu softplus mish hardtanh relu6 hardswish hardsigmoid logsigmoid "
    "softsign hardshrink softshrink tanhshrink threshold "
    "cos sin tan acos asin atan cosh sinh acosh asinh atanh log log1p log2 log10 exp2 expm1 "
    "erf erfc erfinv logit sinc sign sgn round floor ceil trunc frac int long bool "
    "logical_not bitwise_not __invert__ isnan isinf isfinite "
    "__gt__ __lt__ __ge__ __le__ __eq__ __ne__ gt lt ge le eq ne maximum minimum fmax fmin "
    "logical_and logical_or logical_xor __and__ __or__ __xor__ __rand__ __ror__ "
    "bitwise_and bitwise_or bitwise_xor lerp addcmul addcdiv float_power __rpow__ rsub "
    "remainder fmod __mod__ floor_divide __floordiv__ __rfloordiv__ atan2 hypot xlogy logaddexp "
    "clamp_min clamp_max clip heaviside"
)


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
    dims = [one % part.local.ndim for one in _dims(func.__name__, args, kwargs)]
    if not dims or part.dim in dims:
        return NotImplemented
    return shapes.widened(part, func(part.local, *args, **kwargs), dims)


def _dims(name: str, args: Sequence[Any], kwargs: Kwargs) -> list[int]:
    """Return the dimensions that an operation goes along; none where it is all of them."""
    place = _PLACE_OF_DIM[name]
    named = [kwargs[one] for one in ("dim", "dims", "axis") if kwargs.get(one) is not None]
    found = named or list(args[place : None if name == "flip" else place + 1])
    found = found or [_DEFAULT_DIM.get(name)]
    flat = [one for some in found for one in (some if isinstance(some, tuple | list) else [some])]
    return flat if all(type(one) is int for one in flat) else []


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


def _in_order(args: Sequence[Any], kwargs: Kwargs) -> list[Any]:
    names = ("dim", "index", "src" if "src" in kwargs else "value")[len(args) - 1 :]
    if set(kwargs) - set(names):
        return [None, None, None]
    return [*args, *(kwargs[name] for name in names if name in kwargs)]


def _take_along(func: Any, sharded: Any, indices: Any, dim: Any = None) -> Any:
    return _by_index(lambda one, dim, at: func(one, at, dim), sharded, dim, indices)


def _like(func: Any, sharded: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a full tensor like one that is cut: random numbers are those of a single device."""
    if part_of(sharded) is None:
        return NotImplemented
    return func(_shaped(sharded), *args, **kwargs)


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


# What comes after the blocks: losses, sums, and logits that are shifted against their labels.


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
        return reduced(func, sharded, dim, *args, **kwargs)
    ndim = part.local.ndim
    places = range(ndim) if dim is None or not dims else {one % ndim for one in dims}
    if part.dim not in places:
        return reduced(func, sharded, dim, *args, **kwargs)
    is_kept = bool(args[0] if args else kwargs.get("keepdim", False))
    if not (part.local.is_floating_point() and sharded.numel()) or len(args) > 1:
        return NotImplemented
    if set(kwargs) - {"dtype", "keepdim"} or "out" in kwargs:
        return NotImplemented
    # The part without padding has a dimension of blocks more, behind that of positions.
    summed_over = [one + (one > part.dim) for one in sorted(places)] + [part.dim + 1]
    summed = part.own_positions().sum(summed_over, keepdim=is_kept, dtype=kwargs.get("dtype"))
    result = total(summed.squeeze(part.dim + 1) if is_kept else summed, part.group)
    count = math.prod(part.full_shape[one] for one in places)
    return result / count if func.__name__ == "mean" else result


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
    result = shapes.getitem(func, sharded, tuple(entries))
    if result is NotImplemented:
        return result
    shorter = replace(result.part, padding=result.part.padding + part.width - stop)
    return wrapped(shorter)


def _narrow(func: Any, sharded: Any, dim: int, start: Any, length: int) -> Any:
    part = part_of(sharded)
    is_of_sequence = part is not None and dim % sharded.ndim == part.dim
    if not is_of_sequence or not isinstance(start, int):
        return shapes.along(func, sharded, dim, start, length)
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


_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss kl_div soft_margin_loss poisson_nll_loss "
    "binary_cross_entropy binary_cross_entropy_with_logits"
)
RULES.update(
    linear=_linear,
    addmm=_addmm,
    baddbmm=_baddbmm,
    pad=_pad,
    conv1d=_conv1d,
    prelu=_prelu,
    take_along_dim=_take_along,
    expand_as=_expand_as,
    narrow=_narrow,
    __getitem__=_getitem,
    **named(_matmul, "matmul bmm __matmul__"),
    **named(elementwise, _ELEMENTWISE),
    **dict.fromkeys(_PLACE_OF_DIM, _along),
    **named(_by_index, "gather scatter scatter_add"),
    **named(_like, "zeros_like ones_like full_like empty_like rand_like randn_like randint_like"),
    **named(_triangle, "tril triu"),
    **named(_view_as, "view_as reshape_as"),
    **named(_loss, "cross_entropy nll_loss"),
    **named(_sum, "sum mean"),
    **named(_elementwise_loss, _LOSSES),
)
