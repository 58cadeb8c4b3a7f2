"""The moves of elements between ranks when a flat range is cut anew.

    old   |--- shard 0 ---|--- shard 1 ---|--- shard 2 ---|      each held by one rank or several
    new   |-- rank 0 --|-- rank 1 --|-- rank 2 --|-- rank 3 --|

Every new rank gets each element of its range once: from its own memory where it holds the shard,
else from a holder that has little to send so far. Pure arithmetic: no tensors, no ranks.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from lightning_shard.errors import LayoutError

# A range that several ranks could send is divided into parts of at least so many elements.
_MIN_PART_NUMEL = 1 << 14


class Move(NamedTuple):
    """A range of elements on its way.

    Attributes:
        source: The rank that holds the elements.
        target: The rank that gets them; may be the same.
        shard: The old shard in which the source has them.
        start: The first element, counted over the full buffer.
        stop: One past the last element.
    """

    source: int
    target: int
    shard: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def plan_moves(
    holders: Mapping[int, Sequence[int]],
    old_bounds: Mapping[int, tuple[int, int]],
    new_bounds: Sequence[tuple[int, int]],
    *,
    min_part_numel: int = _MIN_PART_NUMEL,
) -> list[Move]:
    """Plan which ranges travel from which rank to which.

    Args:
        holders: By old shard, the ranks that have it.
        old_bounds: By old shard, its first and one-past-last element; disjoint. Elements in none
            of them go nowhere.
        new_bounds: By rank, the bounds of its new range; ranges may overlap or be the same.
        min_part_numel: A range is divided between holders down to this many elements.

    Returns:
        The moves by target and start: the same on every rank that is given the same.

    Raises:
        LayoutError: Nobody holds a shard of which elements are wanted.
    """
    moves: list[Move] = []
    load = dict.fromkeys((rank for ranks in holders.values() for rank in ranks), 0)
    for target, (first, last) in enumerate(new_bounds):
        for shard, (begin, end) in sorted(old_bounds.items(), key=lambda item: item[1]):
            start, stop = max(first, begin), min(last, end)
            if start >= stop:
                continue
            having = holders.get(shard, ())
            if not having:
                raise LayoutError(
                    f"Rank {target} of {len(new_bounds)} needs the elements {start} to {stop} of "
                    f"shard {shard}, which no rank holds, expected one at least. Take an older "
                    f"snapshot, or a checkpoint."
                )
            if target in having:
                moves.append(Move(target, target, shard, start, stop))
                continue
            for part_start, part_stop in _parts(start, stop, len(having), min_part_numel):
                source = min(having, key=lambda rank: (load[rank], rank))
                load[source] += part_stop - part_start
                moves.append(Move(source, target, shard, part_start, part_stop))
    return moves


def _parts(start: int, stop: int, most: int, min_numel: int) -> list[tuple[int, int]]:
    """Divide a range evenly, into at most so many parts."""
    number = max(1, min(most, (stop - start) // min_numel))
    cuts = [start + (stop - start) * index // number for index in range(number + 1)]
    return list(pairwise(cuts))
