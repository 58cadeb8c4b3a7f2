"""Flat buffers in which every parameter lies full in the shard of one rank, its owner.

    sizes, greatest first    8   6   5   3   2      each to the rank that has least so far
    rank 0                   8           3   2
    rank 1                       6   5

    rank              0               1
    buffer   |-------------|-------------------|    cut between parameters: shards differ in size
    slots    [  weight  ][ w ][ weight ][ weight ][w]

An optimizer of full matrices updates them where they lie, and what a step sends is what it sends of
even shards. Over all buffers of a model a rank has at most 1/N of the elements and one parameter
more: when it got its last one, nobody had less. Pure arithmetic, as in `flat`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from typing_extensions import override

from lightning_shard.core.layout.flat import FlatLayout, build_layout
from lightning_shard.errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class OwnedLayout(FlatLayout):
    """The slots of one flat buffer that is cut between parameters.

    Attributes:
        cuts: Index in the buffer of each shard's first element, and last its number of elements.
    """

    cuts: tuple[int, ...]

    @property
    @override
    def full_numel(self) -> int:
        """Number of elements of the whole buffer, padding included."""
        return self.cuts[-1]

    @override
    def shard_bounds(self, shard: int) -> tuple[int, int]:
        """Indices in the buffer of a shard's first element and of one past its last."""
        return self.cuts[shard], self.cuts[shard + 1]


def assign_owners(numels: Sequence[int], *, num_ranks: int) -> list[int]:
    """Give each parameter an owner, such that ranks own about the same number of elements.

    Args:
        numels: Number of elements of each parameter.
        num_ranks: Number of ranks that share them.

    Returns:
        The owner of each parameter; the same from the same numbers, on every rank.
    """
    owners, held = [0] * len(numels), [0] * num_ranks
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        owners[index] = min(range(num_ranks), key=held.__getitem__)
        held[owners[index]] += numels[index]
    return owners


def build_owned_layout(
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    owners: Sequence[int],
    *,
    num_shards: int,
    align: int = 1,
) -> OwnedLayout:
    """Lay parameters out one behind the other and cut the buffer where the owner changes.

    Args:
        shapes: Name and full shape of each parameter, in buffer order.
        owners: Rank that owns each parameter, in ascending order.
        num_shards: Number of ranks that share the buffer.
        align: Every slot and every shard begins at a multiple of this many elements.

    Raises:
        LayoutError: As `build_layout`, or owners that are out of order or out of range.
    """
    even = build_layout(shapes, num_shards=1, align=align)
    if list(owners) != sorted(owners) or len(owners) != len(shapes) or owners[-1] >= num_shards:
        raise LayoutError(
            f"A buffer that is cut between parameters needs an owner of each of its {len(shapes)} "
            f"parameters, from 0 to {num_shards - 1} in ascending order, got {list(owners)}."
        )
    ends, starts = [0] * num_shards, [slot.offset for slot in even.slots]
    for owner, end in zip(owners, [*starts[1:], even.full_numel], strict=True):
        ends[owner] = end
    cuts = (0, *accumulate(ends, max))
    return OwnedLayout(slots=even.slots, num_shards=num_shards, shard_numel=max(ends), cuts=cuts)
