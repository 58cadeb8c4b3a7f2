"""Some of a group's ranks among themselves, by an all-to-all in which the others get nothing.

    group of 4, heads on 2, rings of 2      {0, 1} {2, 3} share heads     {0, 2} {1, 3} are rings

Every rank of the group calls, each with its own subset, so no group has to be made for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.pending import Pending


@dataclass(frozen=True)
class RankSubset:
    """The ranks of a group that exchange with this one.

    Attributes:
        group: The group; each of its ranks must call, in subsets of one size.
        ranks: Its ranks that are in the subset, ascending; this rank is one.
    """

    group: Collectives
    ranks: Sequence[int]

    @property
    def size(self) -> int:
        """Number of ranks in the subset."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This rank's place in the subset."""
        return self.ranks.index(self.group.rank)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002 - c10d's name
        *,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Pending:
        """Do `Collectives.all_to_all` among the ranks of the subset; sizes are one for each."""
        even = [input.numel() // self.size] * self.size
        return self.group.all_to_all(
            output,
            input,
            output_split_sizes=self._of_all(output_split_sizes or even),
            input_split_sizes=self._of_all(input_split_sizes or even),
            async_op=async_op,
        )

    def _of_all(self, sizes: Sequence[int]) -> list[int]:
        found = [0] * self.group.size
        for rank, size in zip(self.ranks, sizes, strict=True):
            found[rank] = size
        return found


def heads_and_ring(group: Collectives, num_sharing: int) -> tuple[RankSubset, RankSubset]:
    """Return the ranks with which this one shares heads, and those of its ring.

    Args:
        group: Group of the W ranks that share each sequence.
        num_sharing: Number of neighbours that share heads; divides W.
    """
    first = group.rank - group.rank % num_sharing
    sharing = range(first, first + num_sharing)
    ring = range(group.rank % num_sharing, group.size, num_sharing)
    return RankSubset(group, sharing), RankSubset(group, ring)
