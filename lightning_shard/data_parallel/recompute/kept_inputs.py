"""A block's arguments as torch's checkpoint keeps them: every tensor as one that autograd saves.

    block(x, mask=m)   ──>   called(x, m)                   torch keeps tensors by position alone
    block(part of x)   ──>   called(holder of the part)     the block is given the part again

A checkpoint saves its positional tensors, so that hooks of saved tensors see them; all else it
holds. A tensor of which each rank has a part is another matter: autograd, where it has hooks, would
gather it. So its part is kept by itself.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_shard.data_parallel.offload.activations import Saved

TakenApart = tuple[Tensor, Callable[[Tensor], Tensor]]
"""A tensor of plain memory, and the function that makes of one like it what it was taken from."""

_classes: dict[type[Tensor], Callable[[Any], TakenApart]] = {}


def take_apart_by(cls: type[Tensor], take: Callable[[Any], TakenApart]) -> None:
    """Let arguments of a class be taken apart, and their memory kept."""
    _classes[cls] = take


def by_position(
    own: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    keep: Callable[[Tensor], Saved] | None,
) -> tuple[Callable[..., Any], list[Any]]:
    """Return a function of positional arguments alone, and those of a first call.

    Args:
        own: The forward that is called.
        args: Its positional arguments.
        kwargs: Its arguments by name.
        keep: Keeps tensors where autograd has hooks on what it saves; None where it has none.
    """
    values, num_args, names = [*args, *kwargs.values()], len(args), list(kwargs)
    if keep is not None:
        values = [_held(value, keep) for value in values]
    devices = {one.device: None for one in values if isinstance(one, _Held)}

    def called(*given: Any) -> Any:
        found = [one.value() if isinstance(one, _Held) else one for one in given]
        return own(*found[:num_args], **dict(zip(names, found[num_args:], strict=False)))

    # of which torch saves the states of random numbers
    return called, [*values, *(torch.empty(0, device=device) for device in devices)]


def _held(value: Any, keep: Callable[[Tensor], Saved]) -> Any:
    take = _classes.get(type(value))
    return value if take is None else _Held(value, take, keep)


class _Held:
    """An argument that is given as it is once, and from then on put together again."""

    def __init__(
        self, tensor: Tensor, take: Callable[[Any], TakenApart], keep: Callable[[Tensor], Saved]
    ) -> None:
        self.device = tensor.device
        self._first: Tensor | None = tensor
        part, self._rebuild = take(tensor)
        self._requires_grad = part.requires_grad
        self._inner = _held(part, keep)
        self._saved = None if isinstance(self._inner, _Held) else keep(part)
        if self._saved is not None:
            self._inner = None

    def value(self) -> Tensor:
        """Return the argument."""
        if (first := self._first) is not None:
            self._first = None
            return first
        part: Any = self._inner.value() if self._saved is None else self._saved.tensor().detach()
        if self._requires_grad and not part.requires_grad:
            part = computed(part.requires_grad_())
        return self._rebuild(part)


def computed(leaf: Tensor) -> Tensor:
    """Return a tensor in the memory of a leaf that requires a gradient, which may be written to."""
    result: Tensor = _Computed.apply(leaf)  # type: ignore[no-untyped-call]
    return result


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data  # in the same memory, but no view

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
