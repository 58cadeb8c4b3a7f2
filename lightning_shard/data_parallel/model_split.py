"""How a model is split over other ranks than the data-parallel ones, as the engine must know it.

The engine keeps what is here in step with the ranks that hold the same; saving, loading and the
norm of the gradient ask the split for the rest.
"""

from collections.abc import Container, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.layout import Box, PlacedBox, assign_owners, placed_in, whole
from lightning_shard.data_parallel.data_groups import DataGroups


class Cut(Protocol):
    """How a full tensor is cut into the parts of several ranks."""

    def shard(self, full: Tensor, index: int) -> Tensor:
        """Return the part of rank `index`, contiguous and in memory of its own."""

    def assemble(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the full tensor from every rank's part, in rank order."""


class LayerParts(Protocol):
    """Ranks that have parts of the same layers."""

    @property
    def group(self) -> Collectives:
        """Return the group of the ranks."""

    @property
    def shardings(self) -> Mapping[nn.Parameter, Cut]:
        """Return how each parameter is cut that is not full on all of the ranks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FewerRanks:
    """Ranks that average some parameters, fewer than average the others: those with equal parts.

    Attributes:
        group: The ranks that have different parts, which are given different samples.
        data: Those that have equal parts.
        reducing: Second groups of those, for gradients.
    """

    group: Collectives
    data: DataGroups
    reducing: DataGroups


class ModelSplit:
    """The split of a model: how this rank's parameters make up full ones.

    What it says here is that of a model of which every rank has all parameters.

    Attributes:
        groups: The groups of ranks that share the model; none when this rank has all of it.
        groups_of_layers: Groups whose ranks have different parameters, not parts of the same.
        group_sets: Every value of `groups_of`, in the same order on all ranks.
        full_shapes: By parameter its full shape, where this rank has a part of it or nothing.
        fewer_ranks: The ranks that average what not all ranks have that average gradients.
        undivided: The modules of whose children each rank has some; no unit is made of them.
        is_first: Whether this rank is the first of those that share the model.
    """

    groups: Sequence[Collectives] = ()
    groups_of_layers: Sequence[Collectives] = ()
    group_sets: Sequence[Sequence[Collectives]] = ((),)
    full_shapes: Mapping[nn.Parameter, torch.Size] = {}
    fewer_ranks: Sequence[FewerRanks] = ()
    undivided: AbstractSet[nn.Module] = frozenset()
    is_first = True

    @property
    def copies(self) -> Sequence[nn.Parameter]:
        """The parameters of copied modules of which this rank has a part."""
        return ()

    @property
    def parts(self) -> LayerParts | None:
        """The one group of ranks that have parts of the same layers; None for no one."""
        return None

    def groups_of(self, param: nn.Parameter) -> Sequence[Collectives]:
        """Return the groups over whose ranks the elements of `param` are spread."""
        return self.groups if self.is_spread(param) else ()

    def is_here(self, param: nn.Parameter) -> bool:
        """Whether this rank has `param`, or a part of it."""
        return True

    def full_shape(self, param: nn.Parameter) -> torch.Size:
        """Return the full shape of a parameter, or of a copy of one."""
        return param.shape

    def is_spread(self, param: nn.Parameter) -> bool:
        """Whether other ranks of the split have other elements of `param` than this one."""
        return False

    def is_shared(self, param: nn.Parameter) -> bool:
        """Whether several ranks of the split have the same elements of `param`, and not all."""
        return False

    def placement(self, param: nn.Parameter) -> Hashable:
        """Return what is equal, on all ranks or none, for parameters whose parts lie alike."""
        return None

    def counts(self, param: nn.Parameter) -> bool:
        """Whether a norm over `groups_of` counts this rank's elements of `param`."""
        return True

    def full(self, param: nn.Parameter, local: Tensor) -> Tensor:
        """Return a full tensor from parts shaped as `param`; each rank of the split must call.

        Where a rank has no part, `local` is any tensor of the format and device.
        """
        return local

    def local(self, param: nn.Parameter, full: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the full shape of `param`; others as is."""
        return full

    def places(self, param: nn.Parameter, shape: Sequence[int]) -> Sequence[PlacedBox]:
        """Return where the parts of this rank's own tensor of `param` lie in the full one."""
        return [in_place(shape)]


class Unsplit(ModelSplit):
    """A model of which every rank has all parameters."""


def has_parts(split: ModelSplit | None) -> bool:
    """Whether ranks have parts of the same layers."""
    return split is not None and len(split.groups) > len(split.groups_of_layers)


def fewer_ranks_of(groups: Sequence[Collectives], split: ModelSplit) -> FewerRanks | None:
    """Return the ranks that average what is split over `groups`; None for those of all others."""
    return next((one for one in split.fewer_ranks if one.group in groups), None)


def ranks_of(param: nn.Parameter, groups: DataGroups, split: ModelSplit) -> DataGroups:
    """Return the data-parallel ranks of a parameter: those that have the same part of it."""
    fewer = fewer_ranks_of(split.groups_of(param), split)
    return groups if fewer is None else fewer.data


def shards_over(
    groups: Sequence[Collectives], shard: Sequence[Collectives], split: ModelSplit
) -> list[Collectives]:
    """Return the groups over which shards of parameters lie that are split over `groups`.

    `shard` are the groups over which shards of others lie; none where each rank has all of them.
    """
    fewer = fewer_ranks_of(groups, split)
    return [fewer.data.shard] if shard and fewer is not None else list(shard)


def beyond_shards(shard: Sequence[Collectives], split: ModelSplit) -> list[Collectives]:
    """Return the groups of a split over whose ranks elements lie that no group of shards spans."""
    return [one for one in split.groups if not shard or fewer_ranks_of([one], split) is None]


def in_place(shape: Sequence[int]) -> PlacedBox:
    """Return the place of a tensor that is full."""
    return PlacedBox(whole(shape), (0,) * len(shape))


@dataclass(frozen=True, kw_only=True)
class Owners:
    """The owner of each parameter that lies here, or in part, and is updated full.

    stage 1 to 3              the shard ranks have shards     one of them has it full, all the time
    tensor parallel           the ranks of a layer have parts one gathers it for each update
    both                      S x T ranks, of which one       shard rank s has its T ranks' parts
                              updates                         full, and rank t of those gathers
    """

    rank: int = 0
    of_shards: Mapping[nn.Parameter, int] = field(default_factory=dict)
    of_parts: Mapping[nn.Parameter, int] = field(default_factory=dict)

    def gathers(self, param: nn.Parameter) -> bool:
        """Whether this rank gathers the parts of `param` that ranks of its layer have."""
        return self.of_parts.get(param) == self.rank

    def gathered_elsewhere(self, param: nn.Parameter) -> bool:
        """Whether another rank of its layer gathers `param`, and has its state."""
        return self.of_parts.get(param, self.rank) != self.rank


def share_out(
    model: nn.Module,
    groups: DataGroups,
    split: ModelSplit,
    *,
    stage: int,
    owned: Container[nn.Parameter],
) -> Owners:
    """Give each parameter that is updated full an owner, trained ones first; no communication."""
    parts = split.parts
    num_shards = groups.shard.size if stage > 0 else 1
    num_parts = 1 if parts is None else parts.group.size
    if num_shards == num_parts == 1 and stage == 0:
        return Owners()
    full = [one for one in model.parameters() if one in owned and split.is_here(one)]
    ranks: dict[nn.Parameter, int] = {}
    for is_trained in (True, False):
        some = [param for param in full if param.requires_grad is is_trained]
        numels = [split.full_shape(param).numel() for param in some]
        ranks.update(
            zip(some, assign_owners(numels, num_ranks=num_shards * num_parts), strict=True)
        )
    return Owners(
        rank=0 if parts is None else parts.group.rank,
        of_shards={} if stage == 0 else {p: one % num_shards for p, one in ranks.items()},
        of_parts={} if parts is None else {p: one // num_shards for p, one in ranks.items()},
    )


# A model may be split several times: its stages then have parts of their layers each.
#
# whole ──tensor parallel──> this rank's part of every layer ──pipeline──> of its stages' layers


def combined(splits: Sequence[ModelSplit]) -> ModelSplit | None:
    """Return one split for several, each made of what those before it have left; None for none."""
    return reduce(CombinedSplit, splits) if splits else None


class CombinedSplit(ModelSplit):
    """Two splits as one; `full_shapes` has the parameters that are a part here, or not here."""

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
