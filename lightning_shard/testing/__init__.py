"""Run ranks inside one process, with or without injected faults, and assert what they send."""

from lightning_shard.testing.ranks import Fault, injected_faults, run_ranks
from lightning_shard.testing.traffic import Expected, assert_traffic

__all__ = ["Expected", "Fault", "assert_traffic", "injected_faults", "run_ranks"]
