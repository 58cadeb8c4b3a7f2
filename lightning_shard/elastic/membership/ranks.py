"""Which rank this process is, and of how many: asked of the membership, told to everybody else.

launcher               who says who takes part         what becomes of the rest on a loss
in process             a membership table in this process        they go on
Lightning's, srun      a rendezvous server beside the ranks       they go on
torchrun               torchelastic's agents           they are ended, and all start anew
Ray Train              Ray's controller                the same
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_shard.backends._c10d import HashStore
from lightning_shard.backends.base import Backend
from lightning_shard.backends.rendezvous import HOST_KEY
from lightning_shard.core import settings
from lightning_shard.elastic.membership.generation import Generation, Membership
from lightning_shard.elastic.membership.in_process_membership import InProcessMembership
from lightning_shard.elastic.membership.membership_table import Bounds
from lightning_shard.elastic.membership.restart_membership import Restarted, RestartMembership
from lightning_shard.elastic.membership.served_membership import ServedMembership
from lightning_shard.environments import ElasticEnvironment, RayEnvironment
from lightning_shard.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GroupSetup:
    """What the groups of each generation are made with, and who is told this rank's place in it."""

    backend: Backend
    device: torch.device
    timeout: timedelta
    environment: ClusterEnvironment


class ElasticRanks:
    """This process's part in a job: its membership, and its rank in the present generation.

    It is that of later Trainers of this process, too, `of_process`. Of ranks that are threads each
    has its own, which ends with the run.
    """

    of_process: "ClassVar[ElasticRanks | None]" = None

    def __init__(self) -> None:
        self.has_failed = False
        self._membership: Membership | None = None
        self._generation: Generation | None = None

    @property
    def are_known(self) -> bool:
        """Whether there is a generation, or a newcomer's own."""
        return self._generation is not None

    @property
    def generation(self) -> Generation:
        """Who takes part now; there once the environment is set up."""
        if self._generation is None:
            raise ConfigError("There is no generation before trainer.fit (or validate ...) runs.")
        return self._generation

    @property
    def membership(self) -> Membership:
        """This rank's part in the job; there once the environment is set up."""
        if self._membership is None:
            raise ConfigError("There is no membership before trainer.fit (or validate ...) runs.")
        return self._membership

    @property
    def global_rank(self) -> int:
        """This process's rank; 1 of a newcomer that waits, since it must not write files."""
        return self.generation.rank + (self.generation.number == 0)

    @property
    def world_size(self) -> int:
        """The number of ranks; of a newcomer that waits the first ones', for its schedules."""
        if self.generation.number == 0:
            return self.membership.first_size
        return self.generation.size

    def begin(self, membership: Membership, group_setup: GroupSetup) -> None:
        """Take part in the job, or wait as a newcomer; each of the first ranks must call."""
        if not isinstance(membership, InProcessMembership):
            ElasticRanks.of_process = self
        self._membership = membership
        first = membership.begin()
        alone = Generation(number=0, members=(membership.me,), me=membership.me)
        self.enter(first or alone, group_setup)

    def enter(self, generation: Generation, group_setup: GroupSetup) -> None:
        """Make a generation's default group; each of its members must call."""
        self._generation = generation
        self.tell(group_setup.environment)
        setattr(rank_zero_only, "rank", self.global_rank)  # noqa: B010  (a function attribute)
        if generation.number == 0 and not isinstance(self._membership, InProcessMembership):
            _make_group_of_one(group_setup)
        else:
            self.membership.init_groups(
                generation, group_setup.backend, group_setup.device, group_setup.timeout
            )

    def tell(self, environment: ClusterEnvironment) -> None:
        """Tell a cluster environment which rank this is."""
        if isinstance(environment, ElasticEnvironment):
            size = max(self.global_rank + 1, self.generation.size)
            environment.admit(self.global_rank, size)

    def end_run(self) -> None:
        """Note that a run has ended; a thread's part in the job ends with it."""
        if self._membership is not None:
            self._membership.end_run()
        if isinstance(self._membership, InProcessMembership):
            self._membership = self._generation = None

    def end_fit(self) -> None:
        """Note that a fit has ended well; what predecessors of a later one need is gone."""
        if isinstance(self._membership, RestartMembership) and not self.has_failed:
            self._membership.end_fit()

    def leave(self) -> None:
        """Leave the job at exit; the silence of a rank that has failed says that it has."""
        if self._membership is not None and not self.has_failed:
            self._membership.leave()


def make_membership(bounds: Bounds, group_setup: GroupSetup, *, in_process: bool) -> Membership:
    """Return this rank's part in the job, by how it was launched."""
    environment = group_setup.environment
    if in_process:
        return InProcessMembership(bounds)
    if (worker := restarted_worker(environment)) is not None:
        settings.set_rendezvous(environment.main_address, environment.main_port)
        return RestartMembership(
            group_setup.backend, group_setup.device, group_setup.timeout, worker
        )
    assert isinstance(environment, ElasticEnvironment)
    job = settings.job()
    assert job is not None  # the launcher has told it
    rank = None if environment.is_newcomer else environment.global_rank()
    return ServedMembership(job, rank, group_setup.timeout)


def restarted_worker(environment: ClusterEnvironment) -> Restarted | None:
    """Return which worker this is of a job that is restarted as a whole; None of any other."""
    if isinstance(environment, RayEnvironment):
        return Restarted(
            by="Ray Train",
            job=environment.job,
            rank=environment.global_rank(),
            world_size=environment.world_size(),
            limit="FailureConfig(max_failures=...)",
            is_killed=True,
        )
    run = settings.torchrun_job()
    if run is None:
        return None
    place = settings.placement(settings.TORCHRUN)
    return Restarted(
        by="torchrun",
        job=run,
        rank=place.rank,
        world_size=place.world_size,
        limit="--max-restarts",
    )


def _make_group_of_one(group_setup: GroupSetup) -> None:
    store: Any = HashStore()
    store.set(HOST_KEY, "127.0.0.1")
    group_setup.backend.init_process_group(
        rank=0, world_size=1, device=group_setup.device, timeout=group_setup.timeout, store=store
    )
