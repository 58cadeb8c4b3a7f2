"""Run ranks inside one process, with or without injected faults, and assert what they send."""

from lightning_shard.testing.ranks import (
    Expected,
    Fault,
    assert_traffic,
    injected_faults,
    run_ranks,
)

__all__ = ["Expected", "Fault", "assert_traffic", "injected_faults", "run_ranks"]
