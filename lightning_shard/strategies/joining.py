"""How a rank finds its place among the others and joins them: for a Trainer and for Fabric alike.

cluster environment   fitted to the backend, and told which rank this is
process group         the backend's, made once for each launch; later runs of the script adopt it,
                      but for elastic training, which has its own made anew
"""

import atexit
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol
from weakref import ref

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_shard.backends import liveness
from lightning_shard.backends.base import Backend
from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.registry import auto_backend, get_backend
from lightning_shard.core import settings
from lightning_shard.core.states import Checks
from lightning_shard.environments import fitting_environment
from lightning_shard.environments.checks import check_adopted, check_environment
from lightning_shard.environments.mpi import MPIEnvironment
from lightning_shard.environments.ray import RayEnvironment, check_num_devices
from lightning_shard.environments.started_elsewhere import InProcessEnvironment
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.checkpoint_files import with_files
from lightning_shard.strategies.options import RanksOptions


class OnLocalRanks:
    """What a strategy says of its ranks on this host, of a Trainer or of Fabric."""

    _local_ranks: "LocalRanks"
    _checkpoint_io: CheckpointIO | None
    _num_nodes = 1  # a Trainer, or Fabric, sets it
    _collectives: Collectives | None = None
    parallel_devices: Any
    cluster_environment: ClusterEnvironment | None
    local_rank: int

    @property
    def is_in_process(self) -> bool:
        """Whether all ranks run inside this process."""
        return self._local_ranks.are_in_process

    @property
    def backend(self) -> Backend:
        """The communication backend in use; where none is named, what there is decides."""
        ranks = self._local_ranks
        backend = ranks.named_backend
        if backend is None:
            may_share = ranks.may_share_memory and self.num_processes > 1 and self.num_nodes == 1
            are_neighbours = may_share and settings.is_on_one_host()
            backend = auto_backend(self.root_device, are_neighbours=are_neighbours)
        return backend.with_debug(ranks.debug)

    @property
    def root_device(self) -> torch.device:
        """The rank's device.

        Raises:
            ConfigError: There are no devices yet.
        """
        devices, runner = self.parallel_devices, self._local_ranks.runner
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
        return self._count(self.cluster_environment)

    def _count(self, started: ClusterEnvironment | None) -> int:
        """Return the number of ranks on this host, which some environments know."""
        devices = self.parallel_devices or ()
        if self._local_ranks.num_ranks is not None:
            return self._local_ranks.num_ranks
        if isinstance(started, RayEnvironment):
            if devices and devices[0].type == "cpu":
                check_num_devices(started, len(devices))
            return started.local_size
        if isinstance(started, MPIEnvironment) and [one.type for one in devices] == ["cpu"]:
            return started.local_size  # devices="auto" means 1 on CPUs, however many mpirun started
        return len(devices)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes and reads checkpoint files."""
        self._checkpoint_io = with_files(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: CheckpointIO | None) -> None:
        self._checkpoint_io = checkpoint_io

    def set_world_ranks(self) -> None:
        """Fit the cluster environment to the backend, and tell it and Lightning which rank this is.

        Raises:
            ConfigError: The strategy's option contradicts what was passed to the runner, or the
                launcher's variables do.
        """
        found, ranks = self.cluster_environment, self._local_ranks
        assert found is not None
        num_devices = len(self.parallel_devices or ())
        if ranks.num_ranks is not None and num_devices not in (1, ranks.num_ranks):
            raise ConfigError(
                f"num_ranks={ranks.num_ranks} and {ranks.runner}(devices={num_devices}) contradict "
                f"each other; pass one of them, or devices=1 to put all ranks on it."
            )
        if not ranks.are_in_process:
            uses_mpi = ranks.named_backend is not None and ranks.named_backend.name == "mpi"
            found = fitting_environment(found, uses_mpi=uses_mpi)
        elif not isinstance(found, InProcessEnvironment):
            found = InProcessEnvironment(self._count(found))
        take_place(found, self._count(found), self.num_nodes)
        self.cluster_environment = found

    def _enter_groups(self) -> None:
        """Join the other ranks, or take over the groups of an earlier run of this process."""
        if dist.is_initialized():
            self._adopt()
        else:
            self._join()
            if not self.is_in_process:
                leave_at_exit(self)
        if not self.is_in_process:
            note_user(self)

    def _adopt(self) -> None:
        assert self.cluster_environment is not None
        rank, size = self.cluster_environment.global_rank(), self.cluster_environment.world_size()
        check_adopted(rank, size, self._local_ranks.runner)

    def _join(self) -> None:
        assert self.cluster_environment is not None
        environment, timeout = self.cluster_environment, self._local_ranks.timeout
        join(lambda: self.backend, environment, self.root_device, timeout)

    def forget_groups(self) -> None:
        """Refer to no group any more; Gloo aborts when somebody does as one is destroyed."""
        self._collectives = None

    def leave(self) -> None:
        """End the groups at exit."""
        self._collectives = None
        destroy_groups()


class GroupUser(Protocol):
    """A strategy that refers to the process groups of this process."""

    def leave(self) -> None:
        """End the groups at exit."""

    def forget_groups(self) -> None:
        """Refer to no group any more; each rank must call, while the groups still stand."""


_users: "list[ref[GroupUser]]" = []  # in an order that all ranks have


class LocalRanks:
    """What a strategy's options say of its ranks on this host: over which backend, how many.

    Args:
        options: Options of the strategy.
        runner: Class of the object that has the devices: "Trainer" or "Fabric".
        may_share_memory: Whether ranks that choose their backend by themselves may share memory.

    Attributes:
        runner: Class of the object that has the devices.
        named_backend: The backend; None for the one that goes with the devices.
        num_ranks: Number of ranks; None for as many as there are devices.
        may_share_memory: Whether ranks that choose their backend by themselves may share memory.
        debug: Whether ranks compare their calls.
        timeout: Longest wait for a peer.
    """

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

    def use(self, backend: Backend) -> None:
        """Take another backend in place of the one that options have named."""
        self.named_backend = backend


def check_num_nodes(num_nodes: int) -> None:
    """Raise ConfigError if ranks of one process are to be on several hosts."""
    if num_nodes > 1:
        raise ConfigError(
            f"The backend 'in_process' runs every rank on this host, got num_nodes={num_nodes}."
        )


def take_place(environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
    """Tell the cluster environment and Lightning's logging which rank this is.

    Args:
        environment: The environment, which knows the node and the rank in it.
        num_processes: Ranks on this host.
        num_nodes: Number of hosts.
    """
    check_environment(environment, num_processes, num_nodes)
    first = environment.node_rank() * num_processes
    environment.set_global_rank(first + environment.local_rank())
    environment.set_world_size(num_nodes * num_processes)
    setattr(rank_zero_only, "rank", environment.global_rank())  # noqa: B010  (a function attribute)


def join(
    backend: Callable[[], Backend],
    environment: ClusterEnvironment,
    device: torch.device,
    timeout: timedelta,
) -> None:
    """Make the default process group; each rank must call.

    Args:
        backend: Returns the backend of the group, once it is known where the ranks meet.
        environment: Knows this rank's number, and where the ranks meet.
        device: This rank's device.
        timeout: Longest wait for a peer.
    """
    if not isinstance(environment, InProcessEnvironment):
        settings.set_rendezvous(environment.main_address, environment.main_port)
    backend().init_process_group(
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        device=device,
        timeout=timeout,
    )


def leave_at_exit(user: GroupUser) -> None:
    """End the groups when this process ends; a strategy that is given up frees what it holds."""
    atexit.register(_leave, ref(user))


def _leave(user: "ref[GroupUser]") -> None:
    alive = user()
    if alive is None:
        destroy_groups()
    else:
        alive.leave()


def note_user(user: GroupUser) -> None:
    """Note that a strategy refers to the groups of this process from now on."""
    known = [one for one in _users if one() not in (None, user)]
    _users[:] = [*known, ref(user)]


def leave_groups() -> None:
    """End the groups of an earlier run, so that this process can make others; each rank must call.

    Strategies that have used them forget them: what they hold in shards is lost, but under Fabric
    modules are made full.
    """
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
