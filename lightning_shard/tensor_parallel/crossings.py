"""How activations cross into and out of the region of layers that the ranks share.

x (full) ──enter──► layers, each rank with its part of their weights ──leave──► full or in parts
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.placeholders import is_placeholder
from lightning_shard.data_parallel.torch_private import saving_hook, untraced
from lightning_shard.tensor_parallel.dim_sharded_tensor import (
    Part,
    from_local,
    full_tensor,
    own_features,
)
from lightning_shard.tensor_parallel.layers import Crossing, Watched
from lightning_shard.tensor_parallel.plan import PlannedLayer
from lightning_shard.tensor_parallel.randomness import RegionRandomness
from lightning_shard.tensor_parallel.regions import (
    copy_to_region,
    gather_copies,
    gather_to_region,
    reduce_from_region,
    reduce_scatter_from_region,
)
from lightning_shard.tensor_parallel.sequence import enter_region, leave_in_slices
from lightning_shard.tensor_parallel.styles import Style


class Entrance:
    """Enters a region once for all layers that are given the same activation.

    So the gradients of query, key and value are summed over the ranks once. The activation enters
    anew when it was changed in place, and in a checkpoint of activations, which has to save its
    tensors.
    """

    def __init__(self, group: Collectives) -> None:
        self._group = group
        self._last: weakref.ref[Tensor] | None = None
        self._entered: Tensor | None = None
        self._version = 0
        self._saver: Callable[[], object] = lambda: None

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
        follows = tensor.requires_grad and torch.is_grad_enabled()
        if entered is None or not is_known or entered.requires_grad != follows:
            entered = enter_region(tensor, self._group)
            self._last = None  # what it stood for may end with the next line
            self._entered, self._last = entered, weakref.ref(tensor, self._forget)
            self._version = version
            self._saver = (lambda: None) if saver is None else weakref.ref(saver)
        return entered

    def forget(self) -> None:
        """Let go of the last activation, and of the graph behind it."""
        self._last = self._entered = None

    def _forget(self, reference: "weakref.ref[Tensor]") -> None:
        if reference is self._last:
            self.forget()


COMPUTED_ALIKE = ("unsplit", "unsplit_shared", "shared_tail")  # by every rank


class Crossings:
    """Makes the crossings of a model's split layers."""

    def __init__(
        self, group: Collectives, around_dropout: Iterable[nn.Module], *, sequence_parallel: bool
    ) -> None:
        self._group, self._sequence_parallel = group, sequence_parallel
        self._around_dropout = set(around_dropout)
        self._entrance = Entrance(group)
        self.forget = self._entrance.forget
        self._randomness = RegionRandomness(group)
        self.outside = self._randomness.outside

    def of(self, layer: PlannedLayer) -> tuple[Crossing, Crossing]:
        """Return how a layer's input enters and its result leaves."""
        enter, leave = self._enter(layer.module, layer.style), self._leave(layer.style)
        return self._with_randomness(layer, enter, leave)

    def watched(self, layer: PlannedLayer) -> Watched | None:
        """Return how a layer computes while hooks look at it; None for one within a region."""
        style = layer.style
        if style.form == "replica":
            return None
        full = replace(style, full_input=True, full_output=True, lazy_output=False)
        enter, leave = self._enter(layer.module, full), self._leave_full(style)
        enter, leave = self._with_randomness(layer, enter, leave)
        widen = full_tensor if style.full_input else self._crossing(gather_copies, -1)
        return Watched(widen=widen, enter=enter, leave=leave, narrow=self._narrow(style))

    def _leave_full(self, style: Style) -> Crossing:
        """Return how a layer's result becomes full."""
        if style.form in COMPUTED_ALIKE:
            return full_tensor
        if style.form == "shared":
            return partial(self._one_of_each_head, style.num_blocks)
        if style.form == "colwise":
            return lambda tensor: full_tensor(self._wide(style, tensor))
        return self._crossing(reduce_from_region)

    def _narrow(self, style: Style) -> Crossing:
        """Return what makes of a full result what a layer gives where nobody looks."""
        if style.form in COMPUTED_ALIKE:
            return self._leave(style)
        own = partial(self._own_features_of, style)
        if style.lazy_output:
            return lambda tensor: self._wide(style, own(tensor))
        return _unchanged if style.full_output else own

    def _one_of_each_head(self, num_heads: int, own: Tensor) -> Tensor:
        """Return all heads, each of which several ranks have computed."""
        group = self._group
        copies: Tensor = gather_copies(own, -1, group).unflatten(-1, (group.size, -1))  # type: ignore[no-untyped-call]
        return copies[..., :: group.size // num_heads, :].flatten(-2)

    def _with_randomness(
        self, layer: PlannedLayer, enter: Crossing, leave: Crossing
    ) -> tuple[Crossing, Crossing]:
        """Let random numbers be those of the region from its first layer to its last."""
        module, style, random = layer.module, layer.style, self._randomness
        if style.form in COMPUTED_ALIKE:
            if module in self._around_dropout:
                leave = partial(random.starting, module, leave)
            return (enter if style.full_input else partial(random.leaving, enter)), leave
        if module in self._around_dropout:
            enter = partial(random.entering, module, enter)
        if style.form in ("rowwise", "attention", "experts"):
            leave = partial(random.leaving, leave)
        return enter, leave

    def _enter(self, module: nn.Module, style: Style) -> Crossing:
        if isinstance(module, nn.Embedding):
            return _unchanged  # indices
        if style.form in COMPUTED_ALIKE:
            return _unchanged if style.full_input else self._crossing(gather_copies, -1)
        if style.form in ("attention", "experts", "shared"):
            return self._entrance
        if style.form == "colwise":
            return self._entrance if style.full_input else self._crossing(gather_to_region, -1)
        return partial(own_features, group=self._group) if style.full_input else _unchanged

    def _leave(self, style: Style) -> Crossing:
        if style.form in COMPUTED_ALIKE:
            if style.form == "shared_tail":
                return partial(self._with_shared_tail, style.num_blocks)
            is_full = style.full_output or style.lazy_output
            return _unchanged if is_full else partial(self._own_features_of, style)
        if style.lazy_output:
            return partial(self._wide, style)
        if style.form == "shared":
            return _unchanged
        if style.form == "colwise":
            return self._crossing(gather_copies, -1) if style.full_output else _unchanged
        if style.full_output:
            leave = leave_in_slices if self._sequence_parallel else reduce_from_region
            return self._crossing(leave)
        return self._crossing(reduce_scatter_from_region, -1)

    def _wide(self, style: Style, own: Tensor) -> Tensor:
        """Let this rank's features look full."""
        return from_local(own, self._group, -1, style.num_blocks)

    def _own_features_of(self, style: Style, result: Tensor) -> Tensor:
        """Take this rank's features of what every rank has computed."""
        result = full_tensor(result)
        dim = result.ndim - 1
        if not style.form.endswith("shared"):
            part = Part(local=result, dim=dim, group=self._group, num_blocks=style.num_blocks)
            return part.split(result, dim)
        width = result.shape[dim] // style.num_blocks
        first = self._group.rank * style.num_blocks // self._group.size * width
        return copy_to_region(result, self._group)[..., first : first + width]

    def _with_shared_tail(self, num_features: int, result: Tensor) -> Tensor:
        """Let each rank's heads use the last features, whose gradient then comes from all ranks."""
        result = full_tensor(result)
        head, tail = result[..., :-num_features], result[..., -num_features:]
        return torch.cat([head, copy_to_region(tail, self._group)], dim=-1)

    def _crossing(self, function: Callable[..., Tensor], *dim: int) -> Crossing:
        return lambda tensor: function(full_tensor(tensor), *dim, self._group)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
