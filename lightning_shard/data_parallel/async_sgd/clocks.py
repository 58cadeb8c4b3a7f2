"""Versions of shards, and how far a rank may be ahead of them: pure arithmetic.

Each shard has a version: how many steps of each rank it includes, by name. A rank at step c (it has
taken c steps) may start the next one while every shard that it holds includes the steps of all
ranks up to c - bound:

                         steps of rank    0   1   2
    shard 0, own, the latest              5   4   2
    shard 1, as it last came from rank 1  4   5   1    <- oldest: a rank at step 5 is 4 ahead
    shard 2, as it last came from rank 2  5   4   3

No rank waits for ever: what the slowest rank needs has been computed, and its owners hand it over,
since none starts a step before every peer has a shard of it that includes as much as it needs
itself (`lacks`).

Source: stale synchronous parallel, Ho et al., NeurIPS 2013.
"""

from collections.abc import Sequence


class Clocks:
    """One rank's knowledge of steps and versions.

    Args:
        rank: This rank, which owns the shard of its number.
        num_ranks: Number of ranks.
        bound: Number of steps that a rank may be ahead of the oldest version it holds; 1 or more.

    Attributes:
        step: Number of steps that this rank has taken.
        included: By shard and rank, the number of that rank's steps that the shard held here
            includes.
        arrived: By rank, the number of its gradients that have arrived; not all are applied yet.
    """

    def __init__(self, rank: int, num_ranks: int, bound: int) -> None:
        self.step = 0
        self.included = [[0] * num_ranks for _ in range(num_ranks)]
        self.arrived = [0] * num_ranks
        self._rank, self._bound = rank, bound
        self._handed_over = [0] * num_ranks  # by peer, what its copy of the own shard includes

    @property
    def own(self) -> list[int]:
        """The version of this rank's own shard."""
        return self.included[self._rank]

    @property
    def staleness(self) -> int:
        """Number of steps that the oldest part of the parameters held here lies behind."""
        return self.step - min(map(min, self.included))

    @property
    def may_start(self) -> bool:
        """Whether this rank may start its next step."""
        return self.staleness <= self._bound

    def age(self, version: Sequence[int]) -> int:
        """Return the number of gradients that the own shard has taken since `version`."""
        return sum(self.own) - sum(version)

    def arrive(self, rank: int) -> None:
        """Note that the gradient of one more step of `rank` is here."""
        self.arrived[rank] += 1

    def apply(self, rank: int) -> None:
        """Note that the own shard now includes one more step of `rank`."""
        self.own[rank] += 1

    @property
    def must_apply(self) -> bool:
        """Whether this rank or a peer would go on if all that has arrived were applied."""
        oldest = min(self.arrived)
        peers = (
            known < arrived - self._bound <= oldest
            for rank, (known, arrived) in enumerate(
                zip(self._handed_over, self.arrived, strict=True)
            )
            if rank != self._rank
        )
        return min(self.own) < self.step - self._bound <= oldest or any(peers)

    def learn(self, shard: int, version: Sequence[int]) -> None:
        """Note the version of a shard that has arrived."""
        self.included[shard] = list(version)

    def hand_over(self, peer: int) -> None:
        """Note that the own shard, as it is now, is on its way to `peer`."""
        self._handed_over[peer] = min(self.own)

    def waits(self, peer: int) -> bool:
        """Whether `peer` may wait for the own shard, and would go on if it had it."""
        needed = self.arrived[peer] - self._bound
        return self._handed_over[peer] < needed <= min(self.own)

    def lacks(self, peer: int) -> bool:
        """Whether `peer` has less of the own shard than this rank needs to start a step."""
        return self._handed_over[peer] < self.step - self._bound
