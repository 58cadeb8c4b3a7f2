"""Sequence parallel: between the regions of split layers each rank has a slice of the positions.

    (B, T, C)      norm, dropout, +      colwise ... rowwise      norm, dropout, +
    rank 0         positions 0..T/2  ──┐  all positions,  ┌──►  positions 0..T/2
                                   all-gather            reduce-scatter
    rank 1         positions T/2..T  ──┘  own features    └──►  positions T/2..T

A layer's sum over the ranks leaves as a `DimShardedTensor` along its last dimension but one.
Nothing is sliced before the first such sum. A region's first layer keeps the slice for its
backward.

Source: arXiv:2205.05198.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.torch_private import untraced
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel.dim_sharded_tensor import (
    DimShardedTensor,
    from_local,
    full_tensor,
)
from lightning_shard.tensor_parallel.regions import (
    all_gathered,
    enter_layers,
    reduce_from_region,
    reduce_scatter_from_region,
)


def enter_region(tensor: Tensor, group: Collectives) -> Tensor:
    """Enter with a full activation, or with every rank's slice of one."""
    if isinstance(tensor, DimShardedTensor) and tensor.part.group is group:
        return _enter_sharded(tensor, group)
    return enter_layers(tensor, group)


@untraced
def _enter_sharded(tensor: DimShardedTensor, group: Collectives) -> Tensor:
    part = tensor.part
    if part.place == 1 or part.num_blocks > 1:
        return enter_layers(full_tensor(tensor), group)
    local = part.local
    if torch.is_autocast_enabled(local.device.type) and local.dtype == torch.float32:
        local = local.to(torch.get_autocast_dtype(local.device.type))  # as the layer would
    entered: Tensor = _GatherSlices.apply(local, part.dim, group)  # type: ignore[no-untyped-call]
    return entered


def leave_in_slices(tensor: Tensor, group: Collectives) -> Tensor:
    """Leave with this rank's slice (..., T / W, C) of the sum of the ranks' partial results.

    Without a sequence, (N, C), the sum leaves full.
    """
    length = tensor.shape[-2] if tensor.ndim > 2 else 1
    if group.size == 1 or tensor.ndim <= 2 or (length % group.size and not _is_training(tensor)):
        return reduce_from_region(tensor, group)
    if length % group.size:
        raise ConfigError(
            f"Rank {group.rank}: sequence_parallel cuts dimension {tensor.ndim - 2} of an "
            f"activation of shape {tuple(tensor.shape)} into {group.size} slices, expected a "
            f"multiple of {group.size}. Pad the batches to one, or turn sequence_parallel off."
        )
    dim = tensor.ndim - 2
    return from_local(reduce_scatter_from_region(tensor, dim, group), group, dim)


def saved_as_slice(entered: Tensor) -> AbstractContextManager[None]:
    """Save the slice of an entered activation for backward, instead of the full one, inside.

    The node's backward comes after that of all layers that it is given to, so its slice is there
    for them. They share one gather: the full tensor is let go when all have read it.
    """
    if isinstance(entered, DimShardedTensor) or not hasattr(entered.grad_fn, "num_saved"):
        return nullcontext()  # else it is the node that `_GatherSlices` makes
    memory, node = entered.untyped_storage().data_ptr(), cast(Any, entered.grad_fn)

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        if tensor.untyped_storage().data_ptr() != memory:
            return tensor
        place = tensor.size(), tensor.stride(), tensor.storage_offset()
        node.num_saved += 1
        return lambda: _regathered(node).as_strided(*place)

    return saved_tensors_hooks(pack, _unpack)


def _is_training(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


class _GatherSlices(torch.autograd.Function):
    """Gathers as `gather_to_region`, and keeps the slice for layers that save the full tensor."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, group: Collectives) -> Tensor:
        ctx.dim, ctx.group = dim, group
        ctx.num_saved, ctx.num_read, ctx.full = 0, 0, None
        ctx.save_for_backward(local)
        return all_gathered(local, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter_from_region(grads[0], ctx.dim, ctx.group), None, None


def _unpack(saved: Tensor | Callable[[], Tensor]) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved()


def _regathered(node: Any) -> Tensor:
    full = node.full
    if full is None:
        full = all_gathered(node.saved_tensors[0], node.dim, node.group)
    node.num_read += 1
    is_last = node.num_read == node.num_saved
    node.full, node.num_read = (None, 0) if is_last else (full, node.num_read)
    result: Tensor = full
    return result
