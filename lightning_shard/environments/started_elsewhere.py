"""The base of environments that start nothing, and are told a rendezvous.

MPIEnvironment          rank, sizes and rendezvous from MPI
RayEnvironment          the same from Ray Train
InProcessEnvironment    rank and size from the world of this process, which meets nowhere
"""

from functools import cached_property

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from typing_extensions import override

from lightning_shard.core.settings import Rendezvous


class StartedElsewhere(ClusterEnvironment):
    """Of ranks that a launcher has started, and numbered; they agree on where they meet."""

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        """The host of rank 0; the first call, here or of `main_port`, is collective."""
        return self._rendezvous.host

    @property
    @override
    def main_port(self) -> int:
        """A free port on rank 0's host; the first use of it or of `main_address` is collective."""
        return self._rendezvous.port

    @override
    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher knows the world size."""

    @override
    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher knows the rank."""

    @cached_property
    def _rendezvous(self) -> Rendezvous:
        """Where the ranks meet, and the job's token; every rank must ask."""
        raise NotImplementedError
