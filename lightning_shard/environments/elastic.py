"""The cluster environment of an elastic job, whose ranks change as it runs.

initial ranks    what their own environment says, until they are admitted anew
a newcomer       rank 1 of 2 until it is admitted: no rank zero, so that it writes nothing
all              what the last `admit` said: their rank in the present generation
"""

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_shard.core import settings
from lightning_shard.environments.ray import RayEnvironment
from lightning_shard.errors import ConfigError

_OF_NEWCOMER = (1, 2)


class ElasticEnvironment(ClusterEnvironment):
    """Answers for a process whose rank may change; `found` is its own, which knows its host."""

    def __init__(self, found: ClusterEnvironment) -> None:
        super().__init__()
        self.found = found
        self.is_newcomer = settings.joins_job()
        self._place: tuple[int, int] | None = None
        if self.is_newcomer:
            self._take(*_OF_NEWCOMER)

    def admit(self, rank: int, world_size: int) -> None:
        """Answer with this rank and world size from now on, as the newly formed generation says."""
        if not 0 <= rank < world_size:
            raise ConfigError(
                f"ElasticEnvironment: got rank {rank} of {world_size}, expected from 0 and below."
            )
        self._take(rank, world_size)

    def _take(self, rank: int, world_size: int) -> None:
        self._place = (rank, world_size)
        setattr(rank_zero_only, "rank", rank)  # noqa: B010  (a function attribute)

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return self.is_newcomer or self.found.creates_processes_externally

    @property
    @override
    def main_address(self) -> str:
        job = settings.job() if self.is_newcomer else None
        return self.found.main_address if job is None else job.host

    @property
    @override
    def main_port(self) -> int:
        job = settings.job() if self.is_newcomer else None
        return self.found.main_port if job is None else job.port

    @staticmethod
    @override
    def detect() -> bool:
        return False  # only ever asked for by name

    @override
    def world_size(self) -> int:
        return self.found.world_size() if self._place is None else self._place[1]

    @override
    def set_world_size(self, size: int) -> None:
        """Pass the size on before admission; a newcomer's and a member's comes from `admit`."""
        if self._place is None:
            self.found.set_world_size(size)

    @override
    def global_rank(self) -> int:
        return self.found.global_rank() if self._place is None else self._place[0]

    @override
    def set_global_rank(self, rank: int) -> None:
        """Pass the rank on before admission; a newcomer's and a member's comes from `admit`."""
        if self._place is None:
            self.found.set_global_rank(rank)

    @override
    def local_rank(self) -> int:
        return self.found.local_rank()

    @override
    def node_rank(self) -> int:
        return self.found.node_rank()

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if not self.is_newcomer:
            self.found.validate_settings(num_devices, num_nodes)

    @override
    def teardown(self) -> None:
        self.found.teardown()


def elastic_environment(found: ClusterEnvironment) -> ClusterEnvironment:
    """Return the environment of an elastic job, wrapped around the one that Lightning found.

    Ranks of torchrun and of Ray Train keep it: these say who takes part, and start all anew.
    """
    if isinstance(found, ElasticEnvironment | TorchElasticEnvironment | RayEnvironment):
        return found
    return ElasticEnvironment(found)
