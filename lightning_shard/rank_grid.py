"""Ranks as points of a grid whose axes are named: pure arithmetic, for any axes.

RankGrid({"pp": 2, "dp": 2, "tp": 2})      from the slowest axis to the fastest

rank 5 = 1 * 4 + 0 * 2 + 1                 coordinates {"pp": 1, "dp": 0, "tp": 1}
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Generic, TypeVar

from lightning_shard.errors import ConfigError

A = TypeVar("A", bound=str)


class RankGrid(Generic[A]):
    """A grid of ranks.

    Args:
        sizes: Number of ranks along each axis, from the slowest axis to the fastest.
    """

    def __init__(self, sizes: Mapping[A, int]) -> None:
        self._sizes = dict(sizes)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the grid."""
        return prod(self._sizes.values())

    def coordinates(self, rank: int) -> dict[A, int]:
        """Return the index of `rank` on each axis."""
        found: dict[A, int] = {}
        for axis, size in reversed(self._sizes.items()):
            rank, found[axis] = divmod(rank, size)
        return found

    def rank_at(self, coordinates: Mapping[A, int]) -> int:
        """Return the rank at an index on each axis; a missing axis counts as 0."""
        rank = 0
        for axis, size in self._sizes.items():
            rank = rank * size + coordinates.get(axis, 0)
        return rank

    def peers(self, axes: A | Sequence[A], rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` on these axes only, ascending, itself too.

        Raises:
            ConfigError: The grid has no such axis.
        """
        along = self._known(axes)
        first = self.rank_at(self.coordinates(rank) | dict.fromkeys(along, 0))
        return tuple(first + offset for offset in self._corner(along))

    def groups(self, axes: A | Sequence[A]) -> list[tuple[int, ...]]:
        """Return every group of peers along these axes, in the order of their first ranks.

        Raises:
            ConfigError: The grid has no such axis.
        """
        along = self._known(axes)
        offsets = self._corner(along)
        firsts = self._corner([other for other in self._sizes if other not in along])
        return [tuple(first + offset for offset in offsets) for first in firsts]

    def _known(self, axes: A | Sequence[A]) -> Sequence[A]:
        along: Sequence[A] = [axes] if isinstance(axes, str) else axes
        if not set(along) <= set(self._sizes):
            known = ", ".join(self._sizes)
            raise ConfigError(f"got axis {axes!r}, expected one or several of {known}.")
        return along

    def _corner(self, along: Sequence[A]) -> list[int]:
        """Return the ranks at index 0 of every other axis, ascending."""
        ranks = [0]
        for axis, size in self._sizes.items():
            indices = range(size if axis in along else 1)
            ranks = [rank * size + index for rank in ranks for index in indices]
        return ranks


def sizes_of(num_ranks: int, axes: Sequence[A]) -> Iterator[dict[A, int]]:
    """Yield every grid of `num_ranks` ranks, those with a small first axis first."""
    first, *others = axes
    if not others:
        yield {first: num_ranks}
        return
    for size in range(1, num_ranks + 1):
        if num_ranks % size == 0:
            for rest in sizes_of(num_ranks // size, others):
                yield {first: size, **rest}
