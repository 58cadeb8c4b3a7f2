"""The ranks that have left, and how far each had come, so that none waits for one that has ended.

    rank 1 ends ──"of group '0' I have begun 12 collectives"──> rank 0, in the 13th: it never comes

Having left is no reason to give a rank up: the root of a broadcast may well be gone while others
still get what it sent. Only an operation that it never began can never end.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

MADE, COLLECTIVE = "made", "collective"
Tally = Counter[str]
"""Counts what a rank has begun in one group: `{"made": 1, "collective": 12, "send 3": 2}`."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """The part of other ranks without which one operation can never end.

    Attributes:
        group: Name of the group in c10d.
        ranks: Global ranks that the operation needs.
        parts: Keys in their tallies whose counts, added up, count their part in it.
        number: The sum that these counts must have reached.
    """

    group: str
    ranks: Sequence[int]
    parts: Sequence[str]
    number: int


class Departures:
    """The tallies of this rank, which it sends when it leaves, and those that others have sent."""

    def __init__(self) -> None:
        self._own: dict[str, Tally] = {}
        self._left: dict[int, dict[str, Tally]] = {}

    @property
    def num_left(self) -> int:
        """Number of other ranks that have left."""
        return len(self._left)

    def tally(self, group: str) -> Tally:
        """Return this rank's own tally of a group, which the caller counts up."""
        return self._own.setdefault(group, Counter())

    def say_goodbye(self, world: "Intracomm", tag: int) -> "list[Request]":
        """Tell every other rank how far this one has come."""
        others = (rank for rank in range(world.size) if rank != world.rank)
        return [world.isend((world.rank, self._own), rank, tag) for rank in others]

    def listen(self, world: "Intracomm", tag: int) -> None:
        """Take every goodbye that has come."""
        while (message := world.improbe(tag=tag)) is not None:
            rank, tallies = message.recv()
            self._left[rank] = tallies

    def who_never_comes(self, need: Need) -> int | None:
        """Return a rank that has left before its part in an operation, if there is one."""
        for rank in need.ranks:
            if rank in self._left:
                tally = self._left[rank].get(need.group, Tally())
                if sum(tally[part] for part in need.parts) < need.number:
                    return rank
        return None
