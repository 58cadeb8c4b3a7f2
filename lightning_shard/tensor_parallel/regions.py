"""The communication of activations where a parallel region begins and ends, and its backward.

    enter    copy               forward: nothing               backward: all-reduce
    leave    reduce             forward: all-reduce            backward: nothing
    ---- with the activations outside in slices of the sequence:
    enter    gather             forward: all-gather            backward: reduce-scatter
    leave    reduce_scatter     forward: reduce-scatter        backward: all-gather
    ---- where a layer alone is split:
    leave    gather (copies)    forward: all-gather            backward: the own slice
    enter    split              forward: the own slice         backward: all-gather

The backward of each is the forward of another, which is called as such, so that a gradient can be
differentiated once more: by a gradient penalty. torch's function transforms are refused.

A value of another pipeline stage has a shape and no elements: it passes without a message.
Source: Megatron-LM, arXiv:1909.08053 and arXiv:2205.05198.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.torch_private import in_transform, untraced
from lightning_shard.errors import ConfigError
from lightning_shard.placeholders import is_placeholder

F = TypeVar("F", bound=Callable[..., Any])
PASSES_ON = "cross_with_part"
"""Method of a tensor of which each rank of another group has a part: that part crosses instead."""


def copy_to_region(tensor: Tensor, group: Collectives) -> Tensor:
    """Enter with a replicated activation; its gradient is summed over the ranks."""
    return _apply(_Copy, tensor, None, group)


def enter_layers(tensor: Tensor, group: Collectives) -> Tensor:
    """Enter with a replicated activation that autocast casts for the layers there.

    The gradient of a cast travels in the format of the layers, but not in float16, whose range a
    sum of such gradients may leave.
    """
    sent_as = None
    if tensor.dtype == torch.float32 and torch.is_autocast_enabled(tensor.device.type):
        sent_as = torch.get_autocast_dtype(tensor.device.type)
    return _apply(_Copy, tensor, torch.bfloat16 if sent_as == torch.bfloat16 else None, group)


def reduce_from_region(tensor: Tensor, group: Collectives) -> Tensor:
    """Leave with the sum of the ranks' partial results."""
    return _apply(_Reduce, tensor, group)


def gather_to_region(tensor: Tensor, dim: int, group: Collectives) -> Tensor:
    """Enter with every rank's slice along `dim`; the gradient is summed and sliced again."""
    return _apply(_Gather, tensor, dim, group)


def reduce_scatter_from_region(tensor: Tensor, dim: int, group: Collectives) -> Tensor:
    """Leave with this rank's slice along `dim` of the sum of the ranks' partial results."""
    return _apply(_ReduceScatter, tensor, dim, group)


def gather_copies(tensor: Tensor, dim: int, group: Collectives) -> Tensor:
    """Leave with every rank's slice along `dim`, all ranks then computing the same."""
    return _apply(_GatherCopies, tensor, dim, group)


def split_to_region(tensor: Tensor, dim: int, group: Collectives) -> Tensor:
    """Enter with this rank's slice along `dim` of a replicated activation."""
    return _apply(_Split, tensor, dim, group)


def scale_gradient(tensor: Tensor, factor: float, group: Collectives) -> Tensor:
    """Pass an activation on, and its gradient times `factor`."""
    return _apply(_ScaleGradient, tensor, factor, group)


def scaled_crossing(grad: Tensor, factor: float, group: Collectives) -> Tensor:
    """Return a gradient times `factor`, where it leaves the side on which gradients are so scaled.

    What is differentiated by it is scaled the other way there, so that its own gradient is passed
    on as it is.
    """
    result: Tensor = _ScaledCrossing.apply(grad, factor, group)  # type: ignore[no-untyped-call]
    return result


def all_reduced(tensor: Tensor, group: Collectives) -> Tensor:
    """Return the sum over the ranks, in new memory."""
    own = tensor.contiguous()
    total = torch.empty_like(own)
    if not is_placeholder(own):
        group.all_reduce(own, output=total).wait()
    return total


def all_gathered(tensor: Tensor, dim: int, group: Collectives) -> Tensor:
    """Return the ranks' slices one after the other along `dim`."""
    own = tensor.contiguous().view(-1)
    flat = own.new_empty(group.size * own.numel())
    if not is_placeholder(own):
        group.all_gather(flat, own).wait()
    slices = flat.view(group.size, *tensor.shape).unbind()
    return torch.cat(slices, dim=dim)


def reduce_scattered(tensor: Tensor, dim: int, group: Collectives) -> Tensor:
    """Return this rank's slice along `dim` of the sum over the ranks."""
    slices = torch.stack(tensor.chunk(group.size, dim=dim))  # (W, ...)
    own = torch.empty_like(slices[0])
    if not is_placeholder(own):
        group.reduce_scatter(own.view(-1), slices.view(-1)).wait()
    return own


def own_slice(tensor: Tensor, dim: int, group: Collectives) -> Tensor:
    """Return this rank's slice along `dim`, a view."""
    return tensor.chunk(group.size, dim=dim)[group.rank]


def refuse_transforms() -> None:
    """Raise ConfigError inside of torch's function transforms, which know no other ranks."""
    if in_transform():
        raise ConfigError(
            "A layer that ranks share, or a sequence, is computed inside torch.func.grad, vmap or "
            "another of torch's function transforms, which see what one rank does only. Leave the "
            "layer out of the plan, use torch.autograd.grad, or use strategy='zero2'."
        )


@untraced
def _apply(function: type[torch.autograd.Function], tensor: Tensor, *args: Any) -> Tensor:
    group: Collectives = args[-1]
    if group.size == 1:
        return tensor
    refuse_transforms()
    on_part = getattr(tensor, PASSES_ON, None)
    if (
        on_part is not None
        and (crossed := on_part(group, partial(_apply, function), args)) is not None
    ):
        passed: Tensor = crossed
        return passed
    result: Tensor = function.apply(tensor, *args)  # type: ignore[no-untyped-call]
    return result


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, sent_as: torch.dtype | None, group: Collectives
    ) -> Tensor:
        ctx.group, ctx.sent_as = group, sent_as
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent = grads[0].to(ctx.sent_as or grads[0].dtype)
        total: Tensor = _Reduce.apply(sent, ctx.group)  # type: ignore[no-untyped-call]
        return total.to(grads[0].dtype), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Collectives) -> Tensor:
        ctx.group = group
        return all_reduced(tensor, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Copy.apply(grads[0], None, ctx.group), None  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: Collectives) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gathered(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _ReduceScatter.apply(grads[0], ctx.dim, ctx.group), None, None  # type: ignore[no-untyped-call]


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: Collectives) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scattered(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Gather.apply(grads[0], ctx.dim, ctx.group), None, None  # type: ignore[no-untyped-call]


class _GatherCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: Collectives) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gathered(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Split.apply(grads[0], ctx.dim, ctx.group), None, None  # type: ignore[no-untyped-call]


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float, group: Collectives) -> Tensor:
        ctx.factor, ctx.group = factor, group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return scaled_crossing(grads[0], ctx.factor, ctx.group), None, None


class _ScaledCrossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, factor: float, group: Collectives) -> Tensor:
        ctx.factor, ctx.group = factor, group
        return grad * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _ScaleGradient.apply(grads[0], ctx.factor, ctx.group), None, None  # type: ignore[no-untyped-call]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: Collectives) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return own_slice(tensor, dim, group).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _GatherCopies.apply(grads[0], ctx.dim, ctx.group), None, None  # type: ignore[no-untyped-call]
