"""Reductions by name, and the local half of an exchange: combining the ranks' slices in rank order.

So the result does not depend on which slice arrived first, and is the same on every rank. Types
narrower than float32 are summed in it: a chain of bf16 additions loses about a bit per doubling.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_shard.backends.calls import op_name
from lightning_shard.errors import ConfigError, LayoutError

ReduceOpName = Literal["sum", "avg", "max", "min"]

C10D_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # and one division: Gloo has no AVG for every type
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}

# Float32 accumulators: small enough to stay in the cache between addends, large enough that the
# cost of a call does not show.
_BLOCK_NUMEL = 1 << 18
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


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether sums of this type need a float32 accumulator (bf16, fp16, fp8)."""
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


def check_op(op: str, dtype: torch.dtype) -> None:
    """Raise unless `op` is known and defined for `dtype`."""
    if op not in C10D_OPS:
        raise ConfigError(f"Unknown reduction {op!r}; expected one of {', '.join(C10D_OPS)}.")
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise LayoutError(
            f"Cannot average {dtype}: the mean of integers is no integer. "
            "Reduce with op='sum' and divide, or convert to a floating type first."
        )


def combine_in_rank_order(
    addends: Sequence[Tensor], own: int, op: ReduceOpName, output: Tensor
) -> None:
    """Reduce the ranks' addends into `output`; the addends other than the own are used up.

    Args:
        addends: One addend of shape (S,) per rank, in rank order, all of one dtype; at least two.
        own: Index of the addend that lies in the caller's own tensor and must not be written.
        op: The reduction; "avg" divides by the number of addends.
        output: Shape (S,). May be the own addend itself. Its dtype is the addends', or float32 when
            they are narrower.
    """
    if op in ("sum", "avg") and _needs_float32(addends, op, output):
        _combine_in_float32(addends, op, output)
        return
    combine = _COMBINE[op]
    total = addends[0]
    for index, addend in enumerate(addends[1:], start=1):
        # Ahead of the own addend the partial result stays in the first received one: `output` may
        # be the own addend, which is still to be read.
        total = combine(total, addend, out=output if index >= own else total)
    if op == "avg":
        output.div_(len(addends))


def _needs_float32(addends: Sequence[Tensor], op: ReduceOpName, output: Tensor) -> bool:
    dtype = addends[0].dtype
    if len(addends) == 2 and output.dtype == dtype:
        # One addition rounds once by itself, and halving bf16 is exact (fp16 could overflow).
        return is_narrow(dtype) and (dtype.itemsize == 1 or (op, dtype) == ("avg", torch.float16))
    return is_narrow(dtype)


def _combine_in_float32(addends: Sequence[Tensor], op: ReduceOpName, output: Tensor) -> None:
    block_numel = min(output.numel(), _BLOCK_NUMEL)
    total, term = torch.empty(2, block_numel, dtype=torch.float32, device=output.device).unbind()
    for start in range(0, output.numel(), _BLOCK_NUMEL):
        block = slice(start, min(start + _BLOCK_NUMEL, output.numel()))
        size = block.stop - block.start
        total[:size].copy_(addends[0][block])
        for addend in addends[1:]:
            total[:size].add_(term[:size].copy_(addend[block]))
        if op == "avg":
            total[:size].div_(len(addends))
        output[block].copy_(total[:size])


def fold_of(op: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that adds a part to a total, which it may write, in their own format."""
    return _FOLDS[op_name(op)]


def reduce_tensors(tensors: Sequence[Tensor], op: Any = ReduceOp.SUM) -> Tensor:
    """Reduce one tensor of each rank, alike in shape and dtype and not written, in rank order.

    Types of 16 and 8 bits are summed in fp32, bool by "or" and "and", unsigned integers modulo
    their range; the new tensor may have a wider dtype.
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
