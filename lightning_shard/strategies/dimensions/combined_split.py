"""A model that is split several times, such as stages of which each has parts of its layers.

whole ──tensor parallel──> this rank's part of every layer ──pipeline──> of its stages' layers
"""

from collections.abc import Hashable, Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.layout import Box, PlacedBox, placed_in
from lightning_shard.data_parallel.model_split import LayerParts, ModelSplit, has_parts


def combined(splits: Sequence[ModelSplit]) -> ModelSplit | None:
    """Return one split for several, each made of what those before it have left; None for none."""
    return reduce(CombinedSplit, splits) if splits else None


class CombinedSplit(ModelSplit):
    """Two splits as one.

    Attributes:
        full_shapes: The full shape of each parameter that is a part here, or not here.
    """

    def __init__(self, inner: ModelSplit, outer: ModelSplit) -> None:
        self._inner, self._outer = inner, outer
        self.full_shapes = {**outer.full_shapes, **inner.full_shapes}
        self.groups = (*inner.groups, *outer.groups)
        self.groups_of_layers = (*inner.groups_of_layers, *outer.groups_of_layers)
        self.group_sets = [(*one, *other) for one in inner.group_sets for other in outer.group_sets]
        self.fewer_ranks = (*inner.fewer_ranks, *outer.fewer_ranks)
        self.undivided = inner.undivided | outer.undivided
        self.is_first = inner.is_first and outer.is_first

    @property
    def copies(self) -> Sequence[nn.Parameter]:
        """The copies of both."""
        return (*self._inner.copies, *self._outer.copies)

    @property
    def parts(self) -> LayerParts | None:
        """Who has parts of the same layers, in one of both; None where both have, or none."""
        found = [one.parts for one in (self._inner, self._outer) if has_parts(one)]
        return found[0] if len(found) == 1 else None

    def groups_of(self, param: nn.Parameter) -> Sequence[Collectives]:
        """Return the groups over whose ranks the elements of `param` are spread."""
        return (*self._inner.groups_of(param), *self._outer.groups_of(param))

    def is_here(self, param: nn.Parameter) -> bool:
        """Whether this rank has `param`, or a part of it."""
        return self._outer.is_here(param) and self._inner.is_here(param)

    def full_shape(self, param: nn.Parameter) -> torch.Size:
        """Return the full shape of a parameter, or of a copy of one."""
        known = self.full_shapes.get(param)
        if known is not None:
            return known
        inner = self._inner.full_shape(param)
        return self._outer.full_shape(param) if inner == param.shape else inner

    def is_spread(self, param: nn.Parameter) -> bool:
        """Whether a parameter is on other ranks, or in part."""
        return self._outer.is_spread(param) or self._inner.is_spread(param)

    def is_shared(self, param: nn.Parameter) -> bool:
        """Whether several ranks of one of the two have a parameter, and not all."""
        return self._outer.is_shared(param) or self._inner.is_shared(param)

    def placement(self, param: nn.Parameter) -> Hashable:
        """Return what is equal for parameters whose parts lie alike in both."""
        return self._inner.placement(param), self._outer.placement(param)

    def counts(self, param: nn.Parameter) -> bool:
        """Whether this rank's elements count in both."""
        return self._outer.counts(param) and self._inner.counts(param)

    def full(self, param: nn.Parameter, local: Tensor) -> Tensor:
        """Return a full tensor; each rank must call."""
        return self._inner.full(param, self._outer.full(param, local))

    def local(self, param: nn.Parameter, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor."""
        return self._outer.local(param, self._inner.local(param, full))

    def places(self, param: nn.Parameter, shape: Sequence[int]) -> Sequence[PlacedBox]:
        """Return where the parts of this rank's own tensor lie in the full one."""
        inner = self._inner.places(param, self._outer.full_shape(param))
        return [
            PlacedBox(_moved(one.local, place), one.offsets)
            for place in self._outer.places(param, shape)
            for one in placed_in(place.full, inner)
        ]


def _moved(box: Box, place: PlacedBox) -> Box:
    """Return a box of what the outer split was made of as one of what it has left."""
    moved = zip(box.offsets, place.offsets, place.local.offsets, strict=True)
    return Box(tuple(at - full + local for at, full, local in moved), box.sizes)
