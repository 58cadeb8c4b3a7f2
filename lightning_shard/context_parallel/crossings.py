"""The communication of activations where the sequence is cut and where it is whole again.

    cut        forward: the own slice       backward: all-gather / W
    gather     forward: all-gather          backward: W times the own slice
    share      forward: nothing             backward: all-reduce / W
    exchange   forward: all-to-all          backward: all-to-all
    total      forward: all-reduce          backward: W times the gradient

Outside of the cuts each of the W ranks computes the same, so its gradients are those of the loss.
Within, a rank computes from its slice only, and its gradients are W times its summand: the mean
over the ranks, which the engine takes of every parameter's, is the gradient of the loss in both
places. Each backward is made of the others, so that a gradient can be differentiated once more.

Source: DeepSpeed Ulysses, arXiv:2309.14509, for the all-to-all.
"""

from typing import Any

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.context_parallel.rank_subset import RankSubset
from lightning_shard.data_parallel.torch_private import untraced
from lightning_shard.tensor_parallel.regions import all_gathered, all_reduced, own_slice


@untraced
def cut_sequence(tensor: Tensor, dim: int, group: Collectives) -> Tensor:
    """Return this rank's slice along `dim` of a tensor that is whole and equal on each rank."""
    result: Tensor = _Cut.apply(tensor, dim, group)  # type: ignore[no-untyped-call]
    return result


@untraced
def gather_sequence(tensor: Tensor, dim: int, group: Collectives) -> Tensor:
    """Return the ranks' slices together, with which each rank goes on alike."""
    result: Tensor = _Gather.apply(tensor, dim, group)  # type: ignore[no-untyped-call]
    return result


@untraced
def share_whole(tensor: Tensor, group: Collectives) -> Tensor:
    """Return a whole tensor for use with this rank's slices of others."""
    result: Tensor = _Share.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


@untraced
def exchange(tensor: Tensor, cut: int, join: int, group: Collectives | RankSubset) -> Tensor:
    """Give each rank its part along one dimension of what the ranks have along another.

    Args:
        tensor: This rank's tensor, contiguous or not.
        cut: Dimension that is cut into W equal parts, part i for rank i.
        join: Another dimension, along which what the ranks send is joined in their order.
        group: Group of the W ranks, or some of its ranks.
    """
    result: Tensor = _Exchange.apply(tensor, cut, join, group)  # type: ignore[no-untyped-call]
    return result


def _exchanged(tensor: Tensor, cut: int, join: int, group: Collectives | RankSubset) -> Tensor:
    sent = torch.stack(tensor.chunk(group.size, dim=cut))  # (W, ...)
    received = torch.empty_like(sent)
    group.all_to_all(received.view(-1), sent.view(-1)).wait()
    return torch.cat(received.unbind(), dim=join)


@untraced
def total(tensor: Tensor, group: Collectives) -> Tensor:
    """Return the sum of what the ranks have of their slices, with which each goes on alike."""
    result: Tensor = _Total.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: Collectives) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return own_slice(tensor, dim, group).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return gather_sequence(grads[0], ctx.dim, ctx.group) / ctx.group.size, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: Collectives) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gathered(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return cut_sequence(grads[0], ctx.dim, ctx.group) * ctx.group.size, None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Collectives) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Mean.apply(grads[0], ctx.group), None  # type: ignore[no-untyped-call]


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Collectives) -> Tensor:
        ctx.group = group
        return all_reduced(tensor, group) / group.size

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return share_whole(grads[0], ctx.group), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Collectives) -> Tensor:
        ctx.group = group
        return all_reduced(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.group.size, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, cut: int, join: int, group: Collectives | RankSubset
    ) -> Tensor:
        ctx.cut, ctx.join, ctx.group = cut, join, group
        return _exchanged(tensor, cut, join, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return exchange(grads[0], ctx.join, ctx.cut, ctx.group), None, None, None
