"""Whether what a launcher has set agrees with itself and with the Trainer, before anything starts.

Lightning's environments check only some variables, late. An environment that a user brings checks
itself.
"""

import re
from collections.abc import Callable

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightning_shard.core import settings
from lightning_shard.core.options import check_num_ranks
from lightning_shard.core.settings import SLURM, TORCHRUN, LauncherVariables, ProcessRanks
from lightning_shard.environments.elastic import ElasticEnvironment
from lightning_shard.errors import ConfigError


def check_environment(environment: ClusterEnvironment, num_devices: int, num_nodes: int) -> None:
    """Check the variables that `environment` reads against the Trainer's devices and nodes."""
    check_num_ranks(num_devices)
    if isinstance(environment, ElasticEnvironment):
        if environment.is_newcomer:
            return  # how many ranks there are is for the job to say
        environment = environment.found
    check = _CHECKS.get(type(environment))  # a subclass may read other variables
    if check is not None:
        check(num_devices, num_nodes)
    environment.validate_settings(num_devices, num_nodes)


def check_placement(
    names: LauncherVariables, placement: ProcessRanks, num_devices: int, num_nodes: int
) -> None:
    """Compare what a launcher has started with `Trainer(devices=..., num_nodes=...)`."""
    who = f"Rank {placement.rank}: {names.launcher} started"
    if placement.local_size not in (None, num_devices):
        got = placement.local_size
        raise ConfigError(
            f"{who} {got} rank(s) on this host ({names.local_size}={got}), but "
            f"Trainer(devices={num_devices}): pass devices={got}, or start "
            f"`{names.start.format(num_devices)}`."
        )
    if placement.num_nodes not in (None, num_nodes):
        got = placement.num_nodes
        name = f" ({names.num_nodes}={got})" if names.num_nodes else ""
        raise ConfigError(
            f"{who} ranks on {got} host(s){name}, but Trainer(num_nodes={num_nodes}): pass "
            f"num_nodes={got}, or start `{names.start_on_nodes.format(num_nodes)}`."
        )
    if placement.world_size != num_devices * num_nodes:
        got = placement.world_size
        raise ConfigError(
            f"{who} {got} rank(s) ({names.world_size}={got}), but Trainer(devices={num_devices}, "
            f"num_nodes={num_nodes}) makes {num_devices * num_nodes}: start "
            f"`{names.start.format(num_devices)}` on each of {num_nodes} host(s), or pass what "
            "has been started."
        )


def check_adopted(rank: int, world_size: int, runner: str) -> None:
    """Raise ConfigError unless the default group that stands has the ranks of a run."""
    here = dist.get_rank(), dist.get_world_size()
    if here != (rank, world_size):
        raise ConfigError(
            f"Rank {here[0]} of {here[1]}: this {runner} would make it rank {rank} of "
            f"{world_size}, but the ranks of this script have met already. After an elastic run "
            f"that has lost ranks or let some in, go on with an ElasticStrategy, or start a script "
            f"of its own; else pass the same devices and num_nodes to every run."
        )


def _check_torchrun(num_devices: int, num_nodes: int) -> None:
    check_placement(TORCHRUN, settings.placement(TORCHRUN), num_devices, num_nodes)
    settings.rendezvous()


def _check_slurm(num_devices: int, num_nodes: int) -> None:
    check_placement(SLURM, settings.placement(SLURM), num_devices, num_nodes)
    if settings.given("MASTER_PORT"):
        settings.master_port()
    else:
        settings.integer("SLURM_JOB_ID", "the job's number, from which the port is made")
    if num_nodes > 1 and not settings.given("MASTER_ADDR"):
        nodes = settings.required("SLURM_NODELIST", "the job's hosts, of which rank 0's is first")
        first = SLURMEnvironment.resolve_root_node_address(nodes)
        if not re.fullmatch(r"[\w.-]+", first):
            raise ConfigError(
                f"SLURM_NODELIST is {nodes!r}, whose first host would be {first!r}; expected hosts "
                "as srun lists them, 'node[1-4]'. Set MASTER_ADDR to the host of rank 0 instead."
            )


def _check_lightning(num_devices: int, num_nodes: int) -> None:
    """Lightning starts this host's other ranks, unless LOCAL_RANK says that somebody has."""
    world_size = num_devices * num_nodes
    started = bool(settings.given("LOCAL_RANK"))
    if started:
        _expect_below("LOCAL_RANK", num_devices, f"Trainer(devices={num_devices})")
        _expect_world_size(world_size)
    elif _is_one_rank_of_many():
        raise ConfigError(
            f"RANK={settings.given('RANK')} and WORLD_SIZE={settings.given('WORLD_SIZE')} are set "
            "but LOCAL_RANK is not, so that each of these processes would start others. Set "
            "LOCAL_RANK for every rank (torchrun does), or NODE_RANK to the same where they number "
            "hosts, or unset them."
        )
    if settings.given(SLURM.rank) not in ("", "0"):
        settings.integer(SLURM.world_size, "the number of tasks that srun started")
    name = "NODE_RANK" if settings.given("NODE_RANK") else "GROUP_RANK"
    if settings.given(name):
        _expect_below(name, num_nodes, f"Trainer(num_nodes={num_nodes})")
    elif num_nodes > 1:
        settings.integer("NODE_RANK", f"this host's number, 0 to {num_nodes - 1}")
    if num_nodes > 1 or (started and world_size > 1):
        settings.rendezvous()
    elif settings.given("MASTER_PORT"):
        settings.master_port()


def _is_one_rank_of_many() -> bool:
    """Whether RANK and WORLD_SIZE count ranks; Kubernetes' operators number hosts by RANK."""
    numbers_hosts = settings.given("RANK") in ("", settings.given("NODE_RANK"))
    return not numbers_hosts and settings.given("WORLD_SIZE") not in ("", "1")


def _expect_below(name: str, limit: int, because: str) -> None:
    value = settings.integer(name, "a number from 0")
    if not 0 <= value < limit:
        raise ConfigError(f"{name} is {value}, expected 0 to {limit - 1}, as {because} says.")


def _expect_world_size(world_size: int) -> None:
    if not settings.given("WORLD_SIZE"):
        return
    if (got := settings.integer("WORLD_SIZE", "the number of ranks")) != world_size:
        raise ConfigError(
            f"WORLD_SIZE is {got}, expected {world_size}: Trainer(devices=...) times "
            "Trainer(num_nodes=...). Start as many ranks, or pass what has been started."
        )


_CHECKS: dict[type[ClusterEnvironment], Callable[[int, int], None]] = {
    TorchElasticEnvironment: _check_torchrun,
    SLURMEnvironment: _check_slurm,
    LightningEnvironment: _check_lightning,
}
