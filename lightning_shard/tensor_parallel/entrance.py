"""The entrance of a region, which all layers that are given one activation share."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.torch_private import saving_hook, untraced
from lightning_shard.placeholders import is_placeholder
from lightning_shard.tensor_parallel.sequence import enter_region


class Entrance:
    """Enters a region once for all layers that are given the same activation.

    Query, key and value all take one activation: their gradients are then added up on this rank,
    and summed over the ranks once instead of three times. The activation enters anew when it was
    changed in place, and in a checkpoint of activations, which has to save its tensors again.

    Args:
        group: Group of the tensor-parallel ranks.
    """

    def __init__(self, group: Collectives) -> None:
        self._group = group
        self._last: weakref.ref[Tensor] | None = None
        self._entered: Tensor | None = None
        self._version = 0
        self._saver: Callable[[], object] = _none

    @untraced
    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the activation as layers in the region take it."""
        if is_placeholder(tensor):  # nothing travels, and nothing may keep it
            return enter_region(tensor, self._group)
        entered, saver = self._entered, saving_hook()
        # Tensors of inference mode do not tell whether they were changed.
        version = -1 if torch.is_inference_mode_enabled() else tensor._version
        is_known = self._last is not None and self._last() is tensor
        is_known = is_known and version == self._version >= 0 and self._saver() is saver
        if entered is None or not is_known or entered.requires_grad != self._follows(tensor):
            entered = enter_region(tensor, self._group)
            self._last = None  # what it stood for may end with the next line
            self._entered, self._last = entered, weakref.ref(tensor, self._forget)
            self._version, self._saver = version, _none if saver is None else weakref.ref(saver)
        return entered

    def _follows(self, tensor: Tensor) -> bool:
        """Whether the entered form of an activation requires a gradient now."""
        return tensor.requires_grad and torch.is_grad_enabled()

    def forget(self) -> None:
        """Let go of the last activation, and of the graph behind it."""
        self._last = self._entered = None

    def _forget(self, reference: "weakref.ref[Tensor]") -> None:
        if reference is self._last:
            self.forget()


def _none() -> None:
    """Return None, as a weak reference to a dead tensor does."""
