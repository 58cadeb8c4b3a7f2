"""The groups of ranks that average the gradients of one model, and that shard its state.

    dp          0 1 2 3 4 5 6 7        start with the same values, agree, average
    shard      [0 1 2 3][4 5 6 7]      one copy of the state each: unshards stay inside
    replicate   0 ───── 4              the same shard of every copy: gradients, 1/S of them
    secondary  [0 1][2 3] ...          a second copy of parameters, from forward to backward

With one copy, `shard` is `dp`. With several, hybrid sharding, a copy belongs on one node. Gradients
are averaged over the copy, in shards, and then each shard over the copies.

Source: hybrid sharding of FSDP, arXiv:2304.11277, section 3.2.2; MiCS, arXiv:2205.00119.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import ConfigError


class Sole:
    """Stands for the collectives of a rank that asks nobody, while it saves what it has."""

    rank = 0
    size = 1

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return this rank's own."""
        return [obj]


@dataclass(frozen=True, kw_only=True)
class DataGroups:
    """The groups of one rank that average gradients.

    Attributes:
        dp: Group of all ranks that average the gradients of one model.
        shard: Group of the ranks that shard one copy of the state, neighbours in `dp`.
        replicate: Group of the ranks with the same shard of each copy; None for one copy.
        secondary: Group of neighbours in `shard` that have a second copy of the parameters between
            forward and backward; None without such copies.
    """

    dp: Collectives
    shard: Collectives
    replicate: Collectives | None = None
    secondary: Collectives | None = None

    @classmethod
    def of(cls, ranks: "Collectives | DataGroups") -> "DataGroups":
        """Return data groups as they are, or those of a single group, which shards one copy."""
        return ranks if isinstance(ranks, DataGroups) else cls(dp=ranks, shard=ranks)

    @property
    def all(self) -> "list[Collectives]":
        """The groups that exist: `dp`, `shard` and those that are not None."""
        beside = [self.replicate, self.secondary]
        return [self.dp, self.shard, *(one for one in beside if one is not None)]

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank has a shard of the copy that is saved."""
        return self.replicate is None or self.replicate.rank == 0

    def with_secondary(self, size: int | None, timeout: timedelta | None = None) -> "DataGroups":
        """Make the group of so many neighbours with a second copy; each of all ranks must call.

        Raises:
            ConfigError: The ranks cannot be divided so.
        """
        num_ranks, rank = self.shard.size, self.shard.rank
        if size is None or size == num_ranks:
            return self
        if num_ranks % size:
            fitting = [one for one in range(2, num_ranks) if num_ranks % one == 0]
            raise ConfigError(
                f"reshard_after_forward={size} is to be the number of neighbouring ranks, those of "
                f"a node, that keep a second copy of the parameters from forward to backward, but "
                f"{num_ranks} ranks share the parameters; expected a divisor of that, one of "
                f"{fitting}, or to leave it out."
            )
        first = rank // size * size
        return replace(self, secondary=self.shard.beside(range(first, first + size), timeout))

    def duplicate(self, timeout: timedelta | None = None) -> "DataGroups":
        """Make second groups of the same ranks, for gradients; each rank must call.

        `replicate` stays as it is, since nothing but gradients travels there.
        """
        dp = self.dp.duplicate(timeout)
        if self.replicate is None:
            return DataGroups.of(dp)
        return replace(self, dp=dp, shard=self.shard.duplicate(timeout))
