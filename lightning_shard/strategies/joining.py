"""How a rank finds its place among the others and joins them: for a Trainer and for Fabric alike.

cluster environment   fitted to the backend, and told which rank this is
process group         the backend's, made once for each launch; later runs of the script adopt it,
                      but for elastic training, which has its own made anew
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol
from weakref import ref

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_shard import settings
from lightning_shard.backends import liveness
from lightning_shard.backends.base import Backend
from lightning_shard.environments import (
    InProcessEnvironment,
    MPIEnvironment,
    RayEnvironment,
    check_environment,
    check_num_devices,
    fitting_environment,
)
from lightning_shard.errors import ConfigError


class GroupUser(Protocol):
    """A strategy that refers to the process groups of this process."""

    def forget_groups(self) -> None:
        """Refer to no group any more; each rank must call, while the groups still stand."""


_users: "list[ref[GroupUser]]" = []  # in an order that all ranks have


def num_local_ranks(
    num_ranks: int | None, devices: Sequence[torch.device], started: ClusterEnvironment | None
) -> int:
    """Return the number of ranks on this host.

    Args:
        num_ranks: The strategy's option.
        devices: Devices of the ranks on this host.
        started: The cluster environment, where there is one.
    """
    if num_ranks is not None:
        return num_ranks
    if isinstance(started, RayEnvironment):
        if devices and devices[0].type == "cpu":
            check_num_devices(started, len(devices))
        return started.local_size
    if isinstance(started, MPIEnvironment) and [one.type for one in devices] == ["cpu"]:
        return started.local_size  # devices="auto" means 1 on CPUs, however many mpirun started
    return len(devices)


def check_num_ranks(num_ranks: int | None, num_devices: int, runner: str) -> None:
    """Raise ConfigError if `num_ranks` contradicts what was passed to the runner.

    Args:
        num_ranks: The strategy's option.
        num_devices: Number of devices of this host.
        runner: Class of the object that has the devices: "Trainer" or "Fabric".
    """
    if num_ranks is not None and num_devices not in (1, num_ranks):
        raise ConfigError(
            f"num_ranks={num_ranks} and {runner}(devices={num_devices}) contradict each "
            f"other; pass one of them, or devices=1 to put all ranks on it."
        )


def check_num_nodes(num_nodes: int) -> None:
    """Raise ConfigError if ranks of one process are to be on several hosts."""
    if num_nodes > 1:
        raise ConfigError(
            f"The backend 'in_process' runs every rank on this host, got num_nodes={num_nodes}."
        )


def environment_for(
    found: ClusterEnvironment, backend: Backend | None, num_processes: Callable[[], int]
) -> ClusterEnvironment:
    """Return a cluster environment that fits the backend: the one that was found, or ours.

    Args:
        found: The cluster environment of Lightning, or the user's.
        backend: The backend; None where the devices decide.
        num_processes: Returns the number of ranks on this host.
    """
    name = None if backend is None else backend.name
    if name != "in_process":
        return fitting_environment(found, uses_mpi=name == "mpi")
    if isinstance(found, InProcessEnvironment):
        return found
    return InProcessEnvironment(num_processes())


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
    backend: Backend,
    environment: ClusterEnvironment,
    device: torch.device,
    timeout: timedelta,
) -> None:
    """Make the default process group; each rank must call.

    Args:
        backend: Backend of the group.
        environment: Knows this rank's number, and where the ranks meet.
        device: This rank's device.
        timeout: Longest wait for a peer.
    """
    if backend.name != "in_process":
        settings.set_rendezvous(environment.main_address, environment.main_port)
    backend.init_process_group(
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        device=device,
        timeout=timeout,
    )


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
