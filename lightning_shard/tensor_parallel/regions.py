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
differentiated once more. A placeholder has no elements: it passes without a message.

Source: Megatron-LM, arXiv:1909.08053 and arXiv:2205.05198.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.placeholders import is_placeholder
from lightning_shard.data_parallel.torch_private import untraced
from lightning_shard.data_parallel.views.transforms import OF_RANKS, refuse_transforms

Exchanging = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
PASSES_ON = "cross_with_part"
"""Method of a tensor of which each rank of another group has a part: that part crosses instead."""


def copy_to_region(tensor: Tensor, group: Collectives) -> Tensor:
    """Enter with a replicated activation; its gradient is summed over the ranks."""
    return _apply("copy", tensor, None, group)


def enter_layers(tensor: Tensor, group: Collectives) -> Tensor:
    """Enter with a replicated activation that autocast casts for the layers there.

    The gradient of a cast travels in the format of the layers, but not in float16, whose range a
    sum of such gradients may leave.
    """
    sent_as = None
    if tensor.dtype == torch.float32 and torch.is_autocast_enabled(tensor.device.type):
        sent_as = torch.get_autocast_dtype(tensor.device.type)
    return _apply("copy", tensor, torch.bfloat16 if sent_as == torch.bfloat16 else None, group)


def reduce_from_region(tensor: Tensor, group: Collectives) -> Tensor:
    """Leave with the sum of the ranks' partial results."""
    return _apply("reduce", tensor, group)


def gather_to_region(tensor: Tensor, dim: int, group: Collectives) -> Tensor:
    """Enter with every rank's slice along `dim`; the gradient is summed and sliced again."""
    return _apply("gather", tensor, dim, group)


def reduce_scatter_from_region(tensor: Tensor, dim: int, group: Collectives) -> Tensor:
    """Leave with this rank's slice along `dim` of the sum of the ranks' partial results."""
    return _apply("reduce_scatter", tensor, dim, group)


def gather_copies(tensor: Tensor, dim: int, group: Collectives) -> Tensor:
    """Leave with every rank's slice along `dim`, all ranks then computing the same."""
    return _apply("gather_copies", tensor, dim, group)


def split_to_region(tensor: Tensor, dim: int, group: Collectives) -> Tensor:
    """Enter with this rank's slice along `dim` of a replicated activation."""
    return _apply("split", tensor, dim, group)


def scale_gradient(tensor: Tensor, factor: float, group: Collectives) -> Tensor:
    """Pass an activation on, and its gradient times `factor`."""
    return _apply("scale", tensor, factor, group)


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
    slices = torch.stack(tensor.chunk(group.size, dim=dim)).contiguous()  # (W, ...)
    own = torch.empty_like(slices[0])
    if not is_placeholder(own):
        group.reduce_scatter(own.view(-1), slices.view(-1)).wait()
    return own


def own_slice(tensor: Tensor, dim: int, group: Collectives) -> Tensor:
    """Return this rank's slice along `dim`, a view."""
    return tensor.chunk(group.size, dim=dim)[group.rank]


@untraced
def _apply(name: str, tensor: Tensor, *args: Any) -> Tensor:
    group: Collectives = args[-1]
    if group.size == 1:
        return tensor
    on_part = getattr(tensor, PASSES_ON, None)
    crossed = None if on_part is None else on_part(group, partial(_apply, name), args)
    return _crossed(name, tensor, *args) if crossed is None else cast(Tensor, crossed)


def _crossed(name: str, tensor: Tensor, *args: Any) -> Tensor:
    refuse_transforms(OF_RANKS, tensor)
    result: Tensor = _Crossing.apply(name, tensor, *args)  # type: ignore[no-untyped-call]
    return result


class _Crossing(torch.autograd.Function):
    """Crosses by a name of `_CROSSINGS`, with all that its forward is given beside the tensor."""

    @staticmethod
    def forward(ctx: Any, name: str, tensor: Tensor, *args: Any) -> Tensor:
        ctx.name, ctx.args = name, args
        return _CROSSINGS[name][0](tensor, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = _CROSSINGS[ctx.name][1](grads[0], *ctx.args)
        return None, grad, *(None for _ in ctx.args)


class TwoWayExchange(torch.autograd.Function):
    """Exchanges tensors together, as one operation; the gradients go back the other way."""

    @staticmethod
    def forward(
        ctx: Any, there: Exchanging, back: Exchanging, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Exchange in one direction."""
        ctx.ways = back, there
        return there(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Exchange gradients in the other one."""
        return None, None, *TwoWayExchange.apply(*ctx.ways, *grads)  # type: ignore[no-untyped-call]


def _passed(tensor: Tensor, *_: Any) -> Tensor:
    return tensor.view_as(tensor)


def _summed(grad: Tensor, sent_as: torch.dtype | None, group: Collectives) -> Tensor:
    return _crossed("reduce", grad.to(sent_as or grad.dtype), group).to(grad.dtype)


def _copied(grad: Tensor, group: Collectives) -> Tensor:
    return _crossed("copy", grad, None, group)


def _taken(tensor: Tensor, dim: int, group: Collectives) -> Tensor:
    return own_slice(tensor, dim, group).contiguous()


def _scaled(grad: Tensor, factor: float, group: Collectives) -> Tensor:
    return grad * factor


_CROSSINGS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "copy": (_passed, _summed),
    "reduce": (all_reduced, _copied),
    "gather": (all_gathered, partial(_crossed, "reduce_scatter")),
    "reduce_scatter": (reduce_scattered, partial(_crossed, "gather")),
    "gather_copies": (all_gathered, partial(_crossed, "split")),
    "split": (_taken, partial(_crossed, "gather_copies")),
    "scale": (_passed, partial(_crossed, "scaled")),
    # What is differentiated by a gradient so scaled is scaled the other way where it comes from.
    "scaled": (_scaled, partial(_crossed, "scale")),
}
"""Forward and backward of each crossing."""
