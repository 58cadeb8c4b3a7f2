"""`self.all_gather(...)` and `strategy.reduce`: tensors of all data-parallel ranks together.

Gathered tensors have gradients where asked for:

    forward    x of rank r            ──> [x of rank 0, x of rank 1, ...] on every rank
    backward   sum over ranks of the  <── each rank's own gradient of its own loss
               gradients for x of r

Parameters' gradients are averaged over the ranks afterwards. So where every rank computes the same
loss of all samples, the sum of W equal gradients and the mean over W ranks cancel: the result is
the gradient on a single device that has all samples, as in torch's `all_gather` and Lightning's
ddp.
"""

from contextlib import nullcontext
from typing import Any, get_args

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.rank_order import ReduceOpName
from lightning_shard.core.placeholders import is_placeholder
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.regions import gather_to_region

_MAX_DIMS = 15  # whose sizes are compared
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


def gathered(tensor: Tensor, collectives: Collectives, *, sync_grads: bool) -> Tensor:
    """Stack the tensors of all ranks.

    Args:
        tensor: Shape (...), the same on each rank. A placeholder of another pipeline stage is one
            on every rank, and is gathered without a message.
        collectives: Group of W ranks, each of which must call.
        sync_grads: Whether gradients flow back to the ranks.

    Returns:
        Shape (W, ...).

    Raises:
        ConfigError: The ranks' shapes differ.
    """
    if is_placeholder(tensor):
        return torch.stack([tensor] * collectives.size)
    _check_shapes(tensor, collectives)
    with nullcontext() if sync_grads else torch.no_grad():
        return gather_to_region(tensor.unsqueeze(0), 0, collectives)


@torch.no_grad()
def _check_shapes(tensor: Tensor, collectives: Collectives) -> None:
    sizes = [tensor.ndim, *tensor.shape[:_MAX_DIMS]]
    own = torch.zeros(1 + _MAX_DIMS, dtype=torch.int64)
    own[: len(sizes)] = torch.tensor(sizes)
    own = own.to(tensor.device)
    every = own.new_empty(collectives.size * len(own))
    collectives.all_gather(every, own).wait()
    rows = every.view(collectives.size, -1).tolist()
    for rank, row in enumerate(rows):
        if row != rows[0]:
            expected, got = (tuple(one[1 : 1 + one[0]]) for one in (rows[0], row))
            raise ConfigError(
                f"all_gather got a tensor of shape {got} on rank {rank} and of shape {expected} on "
                f"rank 0 of the data-parallel ranks; expected one shape. A last batch that is "
                f"smaller on some ranks is what usually differs: let the loader leave it out "
                f"(drop_last=True), or pad the tensor."
            )


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
