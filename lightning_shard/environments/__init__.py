"""Lightning `ClusterEnvironment`s: who am I, and how many are we."""

from lightning_shard.environments.in_process import InProcessEnvironment

__all__ = ["InProcessEnvironment"]
