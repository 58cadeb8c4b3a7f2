"""The ranks of a strategy that come and go: who starts them, who says which there are.

launcher               who says who takes part         what becomes of the rest on a loss
in process             a membership table in this process        they go on
Lightning's, srun      a rendezvous server beside the ranks       they go on
torchrun               torchelastic's agents           they are ended, and all start anew
"""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_shard import settings
from lightning_shard.backends._c10d import HashStore
from lightning_shard.backends.in_process.world import current_world
from lightning_shard.backends.rendezvous import HOST_KEY
from lightning_shard.elastic.generation import Generation, Membership
from lightning_shard.elastic.in_process_membership import InProcessMembership
from lightning_shard.elastic.launcher import ElasticLauncher
from lightning_shard.elastic.rendezvous_server import JobRules
from lightning_shard.elastic.restart_membership import RestartMembership
from lightning_shard.elastic.served_membership import ServedMembership
from lightning_shard.environments import ElasticEnvironment, elastic_environment
from lightning_shard.errors import ConfigError
from lightning_shard.launchers.in_process import InProcessLauncher
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.names import check_interactive
from lightning_shard.trainer._lightning import handle_sigterm
from lightning_shard.trainer.termination import TerminationHandler


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How many ranks may train, and what is borne: see `ElasticStrategy`."""

    min_ranks: int
    max_ranks: int | None
    patience_seconds: float
    max_failures: int


class ElasticMembership(DataParallelStrategy):
    """Answers with the rank and the size of the present generation."""

    _bounds: Bounds
    _membership: Membership | None = None
    _restarts: RestartMembership | None = None  # the membership, under torchrun
    _kept: ServedMembership | None = None  # the membership, of other processes
    _generation: Generation | None = None
    _has_failed = False
    # That of this process's first fit: its part in the job is that of later Trainers, too
    _first: "ClassVar[ElasticMembership | None]" = None

    @property
    @override
    def global_rank(self) -> int:
        if self._generation is None:
            return super().global_rank
        # a newcomer is not the one that writes files
        return self._generation.rank + (self._generation.number == 0)

    @property
    @override
    def world_size(self) -> int:
        if self._generation is None:
            return super().world_size
        if self._generation.number == 0:  # its schedules are to be as long as those of the others
            return self.membership.first_size
        return self._generation.size

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

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self.backend.check(self.root_device)
        if self.is_in_process:
            self._launcher = InProcessLauncher(self.num_processes, is_elastic=True)
            return
        self.cluster_environment = elastic_environment(self.cluster_environment)
        if settings.torchrun_job() is not None:
            super()._configure_launcher()
            return
        rules = JobRules(
            initial_size=self.num_processes * self.num_nodes,
            timeout_seconds=self._timeout.total_seconds(),
            **asdict(self._bounds),
        )
        self._launcher = ElasticLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes, rules
        )
        check_interactive(self, self._launcher, self.num_processes)

    def _make_membership(self) -> Membership:
        if self.is_in_process:
            return InProcessMembership(**asdict(self._bounds))
        environment = self.cluster_environment
        assert environment is not None
        if (run := settings.torchrun_job()) is not None:
            settings.set_rendezvous(environment.main_address, environment.main_port)
            self._restarts = RestartMembership(self.backend, self.root_device, self._timeout, run)
            return self._restarts
        assert isinstance(environment, ElasticEnvironment)
        job = settings.job()
        assert job is not None  # the launcher has told it
        rank = None if environment.is_newcomer else environment.global_rank()
        self._kept = ServedMembership(job, rank, self._timeout)
        return self._kept

    @override
    def setup_environment(self) -> None:
        first = ElasticMembership._first
        adopts = first not in (None, self) and dist.is_initialized() and not self.is_in_process
        if adopts:
            assert first is not None
            self._membership, self._generation = first._membership, first._generation
            self._kept, self._restarts = first._kept, first._restarts
        super().setup_environment()
        if adopts:
            self._admit()

    @override
    def _join(self) -> None:
        if not self.is_in_process:
            ElasticMembership._first = self
        self._membership = self._make_membership()
        first = self._membership.begin()
        alone = Generation(number=0, members=(self._membership.me,), me=self._membership.me)
        self._init_groups(first or alone)

    def _init_groups(self, generation: Generation) -> None:
        self._generation = generation
        if not self.is_in_process and ElasticMembership._first is not None:
            ElasticMembership._first._generation = generation
        self._admit()
        setattr(rank_zero_only, "rank", self.global_rank)  # noqa: B010  (a function attribute)
        if generation.number == 0 and not self.is_in_process:
            self._init_group_of_one()
        else:
            self.membership.init_groups(generation, self.backend, self.root_device, self._timeout)

    def _admit(self) -> None:
        """Tell the cluster environment which rank this is."""
        if isinstance(self.cluster_environment, ElasticEnvironment):
            size = max(self.global_rank + 1, self.generation.size)
            self.cluster_environment.admit(self.global_rank, size)

    def _init_group_of_one(self) -> None:
        store: Any = HashStore()
        store.set(HOST_KEY, "127.0.0.1")
        self.backend.init_process_group(
            rank=0, world_size=1, device=self.root_device, timeout=self._timeout, store=store
        )

    @override
    def watch_for_termination(self, trainer: "pl.Trainer") -> None:
        if (world := current_world()) is not None:
            world.termination.ask_to_leave(world.scheduler)
            handle_sigterm(trainer, TerminationHandler(world.termination))
            return
        if self._kept is None:
            super().watch_for_termination(trainer)
            return
        handle_sigterm(trainer, self._kept.on_sigterm)
        self._kept.watch_signals()

    @override
    def teardown(self) -> None:
        for one in (self, ElasticMembership._first):
            if one is not None:
                one._has_failed = self._failed
        super().teardown()
        if self._kept is not None:
            self._kept.unwatch_signals()
        if self.is_in_process and self._membership is not None:
            self._membership.leave()
            self._membership = self._generation = None

    @override
    def _leave(self) -> None:
        super()._leave()
        if self._kept is not None and not self._has_failed:
            self._kept.leave()  # else its silence says that it has failed
        if self._restarts is not None and not self._has_failed:
            self._restarts.leave()
