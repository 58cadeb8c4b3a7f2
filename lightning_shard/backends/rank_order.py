"""Reductions by name, and the local half of an exchange: combining the ranks' slices in rank order.

Combining in rank order makes the result independent of which slice arrived first, and the same on
every rank, bit for bit. Types narrower than float32 are summed in float32 and rounded once; a chain
of bf16 additions loses about a bit per doubling of the group.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

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


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether sums of this type need a float32 accumulator (bf16, fp16, fp8)."""
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


def check_op(op: str, dtype: torch.dtype) -> None:
    """Raise unless `op` is known and defined for `dtype`.

    Raises:
        ConfigError: An unknown reduction.
        LayoutError: An average of integers, which would have to round.
    """
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
