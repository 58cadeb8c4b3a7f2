"""How a rank finds its place among the others and joins them: for a Trainer and for Fabric alike.

The process group is made once for each launch; later runs of the script adopt it, but for elastic
training, which has its own made anew.
"""

import atexit
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_shard.backends import liveness
from lightning_shard.backends.base import Backend
from lightning_shard.backends.registry import auto_backend, get_backend
from lightning_shard.core import settings
from lightning_shard.core.states import Checks
from lightning_shard.environments import fitting_environment
from lightning_shard.environments.checks import check_adopted, check_environment
from lightning_shard.environments.launchers.processes import ProcessLauncher
from lightning_shard.environments.mpi import MPIEnvironment
from lightning_shard.environments.ray import RayEnvironment, check_num_devices
from lightning_shard.environments.started_elsewhere import InProcessEnvironment
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.checkpoint_files import with_files
from lightning_shard.strategies.names import check_interactive
from lightning_shard.strategies.options import RanksOptions


class OnLocalRanks(ABC):
    """What a strategy says of its ranks on this host, of a Trainer or of Fabric."""

    local_ranks: "LocalRanks"
    _checkpoint_io: CheckpointIO | None
    _num_nodes = 1  # a Trainer, or Fabric, sets it
    parallel_devices: Any
    cluster_environment: ClusterEnvironment | None
    local_rank: int

    @property
    def is_in_process(self) -> bool:
        """Whether all ranks run inside this process."""
        return self.local_ranks.are_in_process

    @property
    def backend(self) -> Backend:
        """The communication backend in use; where none is named, what there is decides."""
        ranks = self.local_ranks
        backend = ranks.named_backend
        if backend is None:
            may_share = ranks.may_share_memory and self.num_processes > 1 and self.num_nodes == 1
            are_neighbours = may_share and settings.is_on_one_host()
            backend = auto_backend(self.root_device, are_neighbours=are_neighbours)
        return backend.with_debug(ranks.debug)

    @property
    def root_device(self) -> torch.device:
        """Return the rank's device, or raise ConfigError when there are no devices yet."""
        devices, runner = self.parallel_devices, self.local_ranks.runner
        if not devices:
            raise ConfigError(f"The strategy has no devices yet; pass it to a {runner} first.")
        device: torch.device = devices[self.local_rank % len(devices)]
        return device

    @property
    def num_nodes(self) -> int:
        """Number of hosts of the run."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if self.is_in_process:
            check_num_nodes(num_nodes)
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on this host."""
        return self.local_ranks.count(self.parallel_devices or (), self.cluster_environment)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes and reads checkpoint files."""
        self._checkpoint_io = with_files(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: CheckpointIO | None) -> None:
        self._checkpoint_io = checkpoint_io

    def set_world_ranks(self) -> None:
        """Fit the cluster environment to the backend, and tell it which rank this is."""
        found, ranks, devices = self.cluster_environment, self.local_ranks, self.parallel_devices
        assert found is not None
        self.cluster_environment = found = ranks.fitting(found, devices or ())
        on_host = ranks.count(devices or (), found)
        check_environment(found, on_host, self.num_nodes)
        found.set_global_rank(found.node_rank() * on_host + found.local_rank())
        found.set_world_size(self.num_nodes * on_host)
        setattr(rank_zero_only, "rank", found.global_rank())  # noqa: B010  (a function attribute)

    def processes(self, make: Callable[..., ProcessLauncher] = ProcessLauncher) -> ProcessLauncher:
        """Return what starts the other ranks of this host by running the script again."""
        launcher = make(self.cluster_environment, self.num_processes, self.num_nodes)
        check_interactive(self, launcher, self.num_processes)
        return launcher

    @abstractmethod
    def forget_groups(self) -> None:
        """Refer to no group any more; Gloo aborts when somebody does as one is destroyed."""

    def leave(self) -> None:
        """End the groups at exit."""
        self.forget_groups()
        destroy_groups()


_users: "list[ref[OnLocalRanks]]" = []  # in an order that all ranks have


class LocalRanks:
    """What the options of a Trainer's or Fabric's strategy say of its ranks on this host."""

    def __init__(
        self, options: RanksOptions, runner: str, *, may_share_memory: bool = True
    ) -> None:
        is_open = options.backend == "auto"  # until there are devices
        self.named_backend: Backend | None = None if is_open else get_backend(options.backend)
        self.num_ranks, self.runner = options.num_ranks, runner
        self.may_share_memory = may_share_memory
        self.debug = settings.debug() or options.debug
        Checks.are_on |= self.debug
        self.timeout = options.longest_wait

    @property
    def are_in_process(self) -> bool:
        """Whether all ranks run inside this process."""
        return self.named_backend is not None and self.named_backend.name == "in_process"

    def count(self, devices: Sequence[torch.device], started: ClusterEnvironment | None) -> int:
        """Return the number of ranks on this host, which some environments know."""
        if self.num_ranks is not None:
            return self.num_ranks
        if isinstance(started, RayEnvironment):
            if devices and devices[0].type == "cpu":
                check_num_devices(started, len(devices))
            return started.local_size
        if isinstance(started, MPIEnvironment) and [one.type for one in devices] == ["cpu"]:
            return started.local_size  # devices="auto" means 1 on CPUs, however many mpirun started
        return len(devices)

    def fitting(
        self, found: ClusterEnvironment, devices: Sequence[torch.device]
    ) -> ClusterEnvironment:
        """Return the cluster environment that goes with the backend."""
        if self.num_ranks is not None and len(devices) not in (1, self.num_ranks):
            raise ConfigError(
                f"num_ranks={self.num_ranks} and {self.runner}(devices={len(devices)}) contradict "
                f"each other; pass one of them, or devices=1 to put all ranks on it."
            )
        if not self.are_in_process:
            uses_mpi = self.named_backend is not None and self.named_backend.name == "mpi"
            return fitting_environment(found, uses_mpi=uses_mpi)
        if isinstance(found, InProcessEnvironment):
            return found
        return InProcessEnvironment(self.count(devices, found))

    def enter_groups(self, strategy: Any) -> None:
        """Join the other ranks, or take over the groups of an earlier run of this process."""
        if dist.is_initialized():
            self.adopt(strategy)
        else:
            self.join(strategy)
            if not self.are_in_process:  # one that is given up frees what it holds
                atexit.register(_leave, ref(strategy))
        if not self.are_in_process:
            known = [one for one in _users if one() not in (None, strategy)]
            _users[:] = [*known, ref(strategy)]

    def adopt(self, strategy: Any) -> None:
        """Go on in groups that are there."""
        environment = strategy.cluster_environment
        check_adopted(environment.global_rank(), environment.world_size(), self.runner)

    def join(self, strategy: Any) -> None:
        """Make the default group; each rank must call."""
        environment = strategy.cluster_environment
        if not isinstance(environment, InProcessEnvironment):
            settings.set_rendezvous(environment.main_address, environment.main_port)
        strategy.backend.init_process_group(  # which is known once it is where the ranks meet
            rank=environment.global_rank(),
            world_size=environment.world_size(),
            device=strategy.root_device,
            timeout=self.timeout,
        )

    def use(self, backend: Backend) -> None:
        """Take another backend in place of the one that options have named."""
        self.named_backend = backend


def check_num_nodes(num_nodes: int) -> None:
    """Raise ConfigError if ranks of one process are to be on several hosts."""
    if num_nodes > 1:
        raise ConfigError(
            f"The backend 'in_process' runs every rank on this host, got num_nodes={num_nodes}."
        )


def _leave(user: "ref[OnLocalRanks]") -> None:
    alive = user()
    if alive is None:
        destroy_groups()
    else:
        alive.leave()


def leave_groups() -> None:
    """End an earlier run's groups, which its strategies forget; each rank must call."""
    for user in [one() for one in _users]:
        if user is not None:
            user.forget_groups()
    _users.clear()
    dist.barrier()
    liveness.stop()
    dist.destroy_process_group()


def destroy_groups() -> None:
    """End the groups, and the watch over their ranks."""
    liveness.stop_at_exit()
    if dist.is_initialized():
        dist.destroy_process_group()
