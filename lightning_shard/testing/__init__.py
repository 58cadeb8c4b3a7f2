"""Run ranks inside one process, with or without injected faults."""

from lightning_shard.testing.ranks import Fault, run_ranks

__all__ = ["Fault", "run_ranks"]
