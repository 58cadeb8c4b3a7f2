"""Run ranks inside one process, with or without injected faults, and assert what they send."""

from lightning_shard.testing.ranks import Fault, run_ranks
from lightning_shard.testing.traffic import Expected, assert_traffic

__all__ = ["Expected", "Fault", "assert_traffic", "run_ranks"]
