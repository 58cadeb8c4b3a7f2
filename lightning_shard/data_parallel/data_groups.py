"""The groups of ranks that average the gradients of one model, and that shard its state.

    dp          0 1 2 3 4 5 6 7        start with the same values, agree, average
    shard      [0 1 2 3][4 5 6 7]      one copy of the state each: unshards stay inside
    replicate   0 ───── 4              the same shard of every copy: gradients, 1/S of them

With one copy, `shard` is `dp`. With several, hybrid sharding, a copy belongs on one node. Gradients
are averaged over the copy, in shards, and then each shard over the copies.

Source: hybrid sharding of FSDP, arXiv:2304.11277, section 3.2.2; MiCS, arXiv:2205.00119.
"""

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from lightning_shard.backends.collectives import Collectives


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
    """

    dp: Collectives
    shard: Collectives
    replicate: Collectives | None = None

    @classmethod
    def of(cls, ranks: "Collectives | DataGroups") -> "DataGroups":
        """Return data groups as they are, or those of a single group, which shards one copy."""
        return ranks if isinstance(ranks, DataGroups) else cls(dp=ranks, shard=ranks)

    @property
    def all(self) -> "list[Collectives]":
        """The groups that exist: `dp`, `shard` and, with several copies, `replicate`."""
        groups = [self.dp, self.shard]
        return groups if self.replicate is None else [*groups, self.replicate]

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank has a shard of the copy that is saved."""
        return self.replicate is None or self.replicate.rank == 0

    def duplicate(self, timeout: timedelta | None = None) -> "DataGroups":
        """Make second groups of the same ranks, for gradients; each rank must call.

        `replicate` stays as it is, since nothing but gradients travels there.
        """
        dp = self.dp.duplicate(timeout)
        if self.replicate is None:
            return DataGroups.of(dp)
        return replace(self, dp=dp, shard=self.shard.duplicate(timeout))
