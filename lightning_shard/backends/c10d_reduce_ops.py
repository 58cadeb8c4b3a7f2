"""Every `ReduceOp` of c10d, computed from one tensor of each rank in rank order: stable bits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_shard.backends.calls import op_name
from lightning_shard.errors import ConfigError

_SUMMED_IN_FP32 = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize <= 2
)
_WIDENED = dict.fromkeys(_SUMMED_IN_FP32, torch.float32) | {
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
}
_LOWEST_INT64 = -(2**63)

_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": lambda total, part: total.add_(part),
    "AVG": lambda total, part: total.add_(part),
    "PREMUL_SUM": lambda total, part: total.add_(part),
    "PRODUCT": lambda total, part: total.mul_(part),
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": lambda total, part: total.bitwise_and_(part),
    "BOR": lambda total, part: total.bitwise_or_(part),
    "BXOR": lambda total, part: total.bitwise_xor_(part),
}
_BOOL_FOLDS = {"SUM": "BOR", "MAX": "BOR", "PRODUCT": "BAND", "MIN": "BAND"}


def fold_of(op: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that adds a part to a total, which it may write, in their own format."""
    return _FOLDS[op_name(op)]


def reduce_tensors(tensors: Sequence[Tensor], op: Any = ReduceOp.SUM) -> Tensor:
    """Reduce one tensor of each rank, in rank order.

    Args:
        tensors: One tensor of each rank, all of one shape and dtype, which are not written. Types
            of 16 and 8 bits are summed in fp32, bool by "or" and "and", unsigned integers modulo
            their range.
        op: The reduction, a `ReduceOp` of c10d.

    Returns:
        A new tensor of that shape, perhaps of a wider dtype.

    Raises:
        ConfigError: The operation is not defined for the dtype.
    """
    name, dtype = op_name(op), tensors[0].dtype
    if dtype is torch.bool:
        if name == "AVG":
            raise ConfigError("all ranks: ReduceOp.AVG of bool tensors; convert them to float.")
        name = _BOOL_FOLDS.get(name, name)
    if dtype is torch.uint64:
        return _reduce_uint64(tensors, name)
    return _finish(_fold(tensors, name, op, _WIDENED.get(dtype, dtype)), name, len(tensors))


def _fold(tensors: Sequence[Tensor], name: str, op: Any, dtype: torch.dtype) -> Tensor:
    # torch 2.11 tells the factor nowhere else.
    factor = op.__getstate__()[1] if name == "PREMUL_SUM" else None
    fold = _FOLDS[name]
    parts = (
        tensor.to(dtype) if factor is None else tensor.to(dtype) * factor for tensor in tensors
    )
    first = next(parts)
    total = first.clone() if first is tensors[0] else first
    for part in parts:
        total = fold(total, part)
    return total


def _finish(total: Tensor, name: str, size: int) -> Tensor:
    if name != "AVG":
        return total
    if total.is_floating_point() or total.is_complex():
        return total.div_(size)
    return total.div_(size, rounding_mode="trunc")


def _reduce_uint64(tensors: Sequence[Tensor], name: str) -> Tensor:
    """Reduce uint64 as int64: sums have the same bits; MIN and MAX flip the sign bit."""
    signed = [tensor.view(torch.int64) for tensor in tensors]
    if name == "AVG":
        raise ConfigError("all ranks: ReduceOp.AVG of uint64 tensors; convert them to int64.")
    if name in ("MIN", "MAX"):
        signed = [tensor ^ _LOWEST_INT64 for tensor in signed]
        return (_fold(signed, name, None, torch.int64) ^ _LOWEST_INT64).view(torch.uint64)
    return _fold(signed, name, None, torch.int64).view(torch.uint64)
