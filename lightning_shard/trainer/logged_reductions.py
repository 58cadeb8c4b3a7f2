"""Reductions of logged values: Lightning's `strategy.reduce` on any backend."""

from typing import Any, get_args

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.rank_order import ReduceOpName
from lightning_shard.errors import ConfigError

_NAMES: dict[str, ReduceOpName] = {
    "mean": "avg",
    **{name: name for name in get_args(ReduceOpName)},
}
_BY_OP: list[tuple[Any, ReduceOpName]] = [
    (ReduceOp.SUM, "sum"),
    (ReduceOp.AVG, "avg"),
    (ReduceOp.MAX, "max"),
    (ReduceOp.MIN, "min"),
]


def reduce_op_name(op: ReduceOp | str | None) -> ReduceOpName:
    """Return the name in `Collectives` of one of Lightning's reductions.

    Raises:
        ConfigError: The reduction is not a mean, sum, maximum or minimum.
    """
    if op is None:
        return "sum"
    if isinstance(op, str):
        if op.lower() in _NAMES:
            return _NAMES[op.lower()]
    else:
        for known, name in _BY_OP:
            if op == known:
                return name
    raise ConfigError(f"Cannot reduce by {op!r}; expected one of {', '.join(_NAMES)}.")


def reduced(tensor: Tensor, op: ReduceOpName, collectives: Collectives) -> Tensor:
    """Return a reduced copy; averages of integers are floats. Each rank must call."""
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if op == "avg" and not (result.is_floating_point() or result.is_complex()):
        result = result.float()
    collectives.all_reduce(result, op).wait()
    return result
