"""Numbers that are made of all elements of a sharded tensor, the same on every rank.

Sums are in float64, so that neither the number of ranks nor where the cuts fall shows in the
result. Each rank must call, in the same order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.backends.rank_order import ReduceOpName
from lightning_shard.data_parallel.views.sharded_tensor import (
    REDUCTIONS,
    ShardedTensor,
    is_alike,
    refuse,
)

_Dims = Sequence[int] | int | None
_INFINITY = float("inf")


def combined(tensor: ShardedTensor, partial: Tensor, op: ReduceOpName = "sum") -> Tensor:
    """Combine this rank's partial result with those of the other ranks that have elements."""
    total = partial.to(tensor.spread.device)
    for group in tensor.spread.groups:
        group.all_reduce(total, op).wait()
    return total.to(tensor.device)


def _counted(tensor: ShardedTensor) -> Tensor:
    """Return this rank's elements, none where they are another rank's too; shape (n,)."""
    flat = tensor.local.reshape(-1)
    return flat if tensor.spread.counts else flat[:0]


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def _check_dims(func: Any, tensor: ShardedTensor, dim: _Dims) -> None:
    """Refuse a reduction that keeps some of several dimensions."""
    dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    kept = set(range(tensor.ndim)) - {one % max(tensor.ndim, 1) for one in dims}
    if dims and kept:
        refuse(func, tensor, f"along dimension {dim} only")


def _shaped(tensor: ShardedTensor, value: Tensor, keepdim: bool) -> Tensor:
    return value.reshape((1,) * tensor.ndim if keepdim else ())


def _sum(
    func: Any,
    tensor: ShardedTensor,
    dim: _Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    _check_dims(func, tensor, dim)
    total = _total(tensor, _counted(tensor))
    kind = tensor.dtype if tensor.dtype.is_floating_point or tensor.dtype.is_complex else None
    return _shaped(tensor, total, keepdim).to(dtype or kind or torch.int64)


def _total(tensor: ShardedTensor, elements: Tensor) -> Tensor:
    return combined(tensor, elements.sum(dtype=_wide(elements.dtype)))


def _nansum(func: Any, tensor: ShardedTensor, *args: Any, **kwargs: Any) -> Tensor:
    return _sum(func, tensor.beside(tensor.local.nan_to_num(0.0, _INFINITY, -_INFINITY)), *args)


def _mean(
    func: Any, tensor: ShardedTensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any
) -> Tensor:
    total = _sum(func, tensor, *args, dtype=_wide(tensor.dtype), **kwargs)
    return (total / tensor.numel()).to(dtype or tensor.dtype)


def _largest(tensor: ShardedTensor, sign: int) -> Tensor:
    """Return the largest element times `sign`; NaN where any element is NaN."""
    elements = _counted(tensor)
    if not elements.dtype.is_floating_point:
        lowest = torch.iinfo(torch.int64).min
        own = (elements.to(torch.int64) * sign).max() if elements.numel() else None
        partial = torch.tensor(lowest) if own is None else own
        return combined(tensor, partial, "max") * sign
    wide = elements.double() * sign
    known = wide[~wide.isnan()]  # what a maximum makes of the others depends on the backend
    top = known.max() if known.numel() else wide.new_tensor(-_INFINITY)
    both = combined(tensor, torch.stack([top, wide.isnan().any().double()]), "max")
    return torch.where(both[1] > 0, torch.nan, both[0]) * sign


def _extreme(sign: int) -> Callable[..., Tensor]:
    def extreme(
        func: Any, tensor: ShardedTensor, dim: _Dims = None, keepdim: bool = False
    ) -> Tensor:
        if isinstance(dim, (ShardedTensor, Tensor)):
            refuse(func, tensor)
        _check_dims(func, tensor, dim)
        if func._schema.name in ("aten::max", "aten::min") and dim is not None:
            refuse(func, tensor, "with indices")
        return _shaped(tensor, _largest(tensor, sign), keepdim).to(tensor.dtype)

    return extreme


def _aminmax(
    func: Any, tensor: ShardedTensor, *, dim: _Dims = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return (
        _extreme(-1)(func, tensor, [] if dim is None else [dim], keepdim),
        _extreme(1)(func, tensor, [] if dim is None else [dim], keepdim),
    )


def _truth(op: ReduceOpName) -> Callable[..., Tensor]:
    def truth(func: Any, tensor: ShardedTensor, dim: _Dims = None, keepdim: bool = False) -> Tensor:
        _check_dims(func, tensor, dim)
        found = _counted(tensor) != 0
        own = found.all() if op == "min" else found.any()
        return _shaped(tensor, combined(tensor, own.to(torch.uint8), op), keepdim).bool()

    return truth


def _count_nonzero(func: Any, tensor: ShardedTensor, dim: _Dims = None) -> Tensor:
    _check_dims(func, tensor, dim)
    return combined(tensor, (_counted(tensor) != 0).sum())


def partial_norm(elements: Tensor, order: float) -> Tensor:
    """Return this rank's contribution to a norm, in float64, for `combine_norms`."""
    if not elements.numel():
        return torch.tensor(_INFINITY if order == -_INFINITY else 0.0, dtype=torch.float64)
    narrow = elements.dtype in (torch.float16, torch.bfloat16)
    norm = torch.linalg.vector_norm(elements, order, dtype=torch.float32 if narrow else None)
    wide: Tensor = norm.to(torch.float64)
    return wide if abs(order) == _INFINITY or order == 0 else wide.pow(order)


def combine_norms(
    partial: Tensor, order: float, reduce: Callable[[Tensor, ReduceOpName], Tensor]
) -> Tensor:
    """Return the norms over all ranks, one per element of the ranks' `partial_norm` results."""
    if abs(order) != _INFINITY:
        total = reduce(partial, "sum")
        return total if order == 0 else total ** (1.0 / order)
    sign = 1.0 if order > 0 else -1.0
    unknown = partial.isnan()  # what a maximum makes of it depends on the backend
    both = torch.stack([(partial * sign).masked_fill(unknown, -_INFINITY), unknown.double()])
    largest, is_unknown = reduce(both, "max").unbind()
    return (largest * sign).masked_fill(is_unknown > 0, torch.nan)


def _vector_norm(
    func: Any,
    tensor: ShardedTensor,
    ord: float = 2,  # noqa: A002 - torch's name
    dim: _Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    _check_dims(func, tensor, dim)
    return _shaped(tensor, _norm_of(tensor, float(ord)), keepdim).to(dtype or _real(tensor.dtype))


def _norm(
    func: Any, tensor: ShardedTensor, p: float | None = 2, *args: Any, **kwargs: Any
) -> Tensor:
    return _vector_norm(func, tensor, 2 if p is None else p, *args, **kwargs)


def _norm_of(tensor: ShardedTensor, order: float) -> Tensor:
    """Return the norm over all ranks, in float64."""
    if tensor.norm_of_all is not None:
        return tensor.norm_of_all(order)
    return combine_norms(
        partial_norm(_counted(tensor), order), order, lambda own, op: combined(tensor, own, op)
    )


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _foreach_norm(
    func: Any,
    tensors: Sequence[Tensor],
    ord: float = 2,  # noqa: A002 - torch's name
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    return [torch.linalg.vector_norm(one, ord, dtype=dtype) for one in tensors]


def _var_mean(
    func: Any,
    tensor: ShardedTensor,
    dim: _Dims = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    _check_dims(func, tensor, dim)
    elements = _counted(tensor)
    mean = _total(tensor, elements) / tensor.numel()
    squares = _total(tensor, (elements.to(mean.dtype) - mean).abs().square())
    count = tensor.numel() - (1 if correction is None else correction)
    var = squares / max(count, 0)
    kind = _real(tensor.dtype)
    return (
        _shaped(tensor, var, keepdim).to(kind),
        _shaped(tensor, mean, keepdim).to(tensor.dtype),
    )


def _std_mean(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    var, mean = _var_mean(*args, **kwargs)
    return var.sqrt(), mean


def _item(func: Any, tensor: ShardedTensor) -> Any:
    """Return the element of a tensor that has one element."""
    if tensor.numel() != 1:
        refuse(func, tensor)
    return _total(tensor, _counted(tensor)).to(tensor.dtype).item()


def _equal(func: Any, tensor: ShardedTensor, other: Tensor) -> bool:
    if not isinstance(tensor, ShardedTensor):
        tensor, other = other, tensor
    return bool((tensor == other).all())


def _dot(func: Any, tensor: ShardedTensor, other: ShardedTensor) -> Tensor:
    both = isinstance(tensor, ShardedTensor) and isinstance(other, ShardedTensor)
    if not (both and is_alike(tensor, other)):
        refuse(func, tensor if isinstance(tensor, ShardedTensor) else other)
    result: Tensor = (tensor * other).sum()
    return result


def _histc(
    func: Any,
    tensor: ShardedTensor,
    bins: int = 100,
    min: float = 0,  # noqa: A002 - torch's name
    max: float = 0,  # noqa: A002
) -> Tensor:
    if min == max:
        min, max = _largest(tensor, -1).item(), _largest(tensor, 1).item()  # noqa: A001
    if min == max:
        min, max = min - 1, max + 1  # noqa: A001 - as torch does
    own = torch.histc(_counted(tensor), bins, min, max).double()
    return combined(tensor, own).to(tensor.dtype)


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "_foreach_norm": _foreach_norm,
    "_local_scalar_dense": _item,
    "all": _truth("min"),
    "amax": _extreme(1),
    "amin": _extreme(-1),
    "aminmax": _aminmax,
    "any": _truth("max"),
    "count_nonzero": _count_nonzero,
    "dot": _dot,
    "equal": _equal,
    "histc": _histc,
    "linalg_vector_norm": _vector_norm,
    "max": _extreme(1),
    "mean": _mean,
    "min": _extreme(-1),
    "nansum": _nansum,
    "norm": _norm,
    "std": lambda *args, **kwargs: _std_mean(*args, **kwargs)[0],
    "std_mean": _std_mean,
    "sum": _sum,
    "var": lambda *args, **kwargs: _var_mean(*args, **kwargs)[0],
    "var_mean": _var_mean,
}

REDUCTIONS.update(_REDUCTIONS)
