"""Environments that start nothing: their base, and that of ranks that are threads of this process.

MPIEnvironment          rank, sizes and rendezvous from MPI
RayEnvironment          the same from Ray Train
InProcessEnvironment    rank and size from the world of this process, which meets nowhere
"""

from functools import cached_property

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from typing_extensions import override

from lightning_shard.backends.in_process.world import current_rank, current_world
from lightning_shard.core.settings import ProcessRanks, Rendezvous
from lightning_shard.errors import ConfigError


class StartedElsewhere(ClusterEnvironment):
    """Of ranks that a launcher has started, and numbered; they agree on where they meet."""

    _placement: ProcessRanks

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""
        assert self._placement.local_size is not None
        return self._placement.local_size

    @override
    def world_size(self) -> int:
        return self._placement.world_size

    @override
    def global_rank(self) -> int:
        return self._placement.rank

    @override
    def local_rank(self) -> int:
        return self._placement.local_rank

    @override
    def node_rank(self) -> int:
        assert self._placement.node_rank is not None
        return self._placement.node_rank

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


class InProcessEnvironment(StartedElsewhere):
    """Answers for the rank that runs now; outside a world, for rank 0."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        if num_ranks < 1:
            raise ConfigError(f"InProcessEnvironment: got num_ranks={num_ranks}, expected from 1.")
        self._num_ranks = num_ranks

    @cached_property
    @override
    def _rendezvous(self) -> Rendezvous:
        return Rendezvous(host="127.0.0.1", port=0)  # no socket is opened

    @staticmethod
    @override
    def detect() -> bool:
        return False  # only ever asked for by name

    @override
    def world_size(self) -> int:
        world = current_world()
        return self._num_ranks if world is None else world.num_ranks

    @override
    def set_world_size(self, size: int) -> None:
        if size != self.world_size():
            raise ConfigError(
                f"in_process: got a world size of {size}, expected {self.world_size()}. Pass "
                "devices=N and nothing else, or the same number as num_ranks."
            )

    @override
    def global_rank(self) -> int:
        return current_rank() or 0

    @override
    def local_rank(self) -> int:
        return self.global_rank()

    @override
    def node_rank(self) -> int:
        return 0
