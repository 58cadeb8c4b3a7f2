"""The cluster environment of workers that Ray Train has started: Ray says which rank each is.

    ranks, sizes          Ray's context of the worker group; a restart makes another group
    where they meet       rank 0 draws a port and the job's token, and tells them over Ray
    the process group     ours: the one that `TorchTrainer` has made is ended first

Ray's own Lightning environment leaves the port and the group to torch, and knows no number of
workers on a host: `Trainer(devices="auto")` would count one of them on CPUs.
"""

import os
import secrets
from functools import cache, cached_property

import torch.distributed as dist
from typing_extensions import override

from lightning_shard.backends.authentication.addresses import free_port
from lightning_shard.core import settings
from lightning_shard.core.settings import ProcessRanks, Rendezvous
from lightning_shard.environments import _ray
from lightning_shard.environments.started_elsewhere import StartedElsewhere
from lightning_shard.errors import ConfigError

_LOOPBACK = "127.0.0.1"


class RayEnvironment(StartedElsewhere):
    """Answers as Ray Train's context does; each worker makes one, in its train function.

    Raises:
        BackendUnavailableError: Ray Train is not installed.
        ConfigError: This process is no worker of Ray Train.
    """

    def __init__(self) -> None:
        super().__init__()
        context = _ray.context()
        self._placement = ProcessRanks(
            rank=int(context.get_world_rank()),
            world_size=int(context.get_world_size()),
            local_rank=int(context.get_local_rank()),
            local_size=int(context.get_local_world_size()),
            node_rank=int(context.get_node_rank()),
        )
        _end_group_of_ray()

    @property
    def num_nodes(self) -> int:
        """Number of nodes, where each has as many workers as this one; else 1."""
        nodes, rest = divmod(self.world_size(), self.local_size)
        return 1 if rest else nodes

    @property
    def job(self) -> str:
        """Name that workers on this node have in common over restarts, with Ray's process id."""
        return f"ray-{_ray.run_id()}-{os.getppid()}"

    @staticmethod
    @override
    def detect() -> bool:
        return _ray.is_worker()

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Compare what Ray has started with `Trainer(num_nodes=...)`.

        Raises:
            ConfigError: The two contradict each other.
        """
        if num_nodes not in (1, self.num_nodes):
            raise ConfigError(
                f"Rank {self.global_rank()}: Ray Train started {self.world_size()} worker(s), "
                f"{self.local_size} on this node, but Trainer(num_nodes={num_nodes}). Leave "
                f"num_nodes out: ScalingConfig(num_workers=...) says how many ranks there are."
            )

    @cached_property
    @override
    def _rendezvous(self) -> Rendezvous:
        """Where the ranks meet; rank 0 says it, and the token, over Ray."""
        own: tuple[str, int, str] | None = None
        if self.global_rank() == 0:
            host = _LOOPBACK if self.local_size == self.world_size() else _ray.own_address()
            own = host, free_port(host), settings.job_token() or secrets.token_hex(16)
        host, port, token = _ray.from_rank_zero(own)
        settings.set_job_token(token)
        return Rendezvous(host=host, port=port)


def check_num_devices(environment: RayEnvironment, num_devices: int) -> None:
    """Compare the CPU ranks of `Trainer(devices=...)` with the workers on this node."""
    if num_devices not in (1, environment.local_size):
        raise ConfigError(
            f"Rank {environment.global_rank()}: Ray Train started {environment.local_size} "
            f"worker(s) on this node, but Trainer(devices={num_devices}). Pass devices='auto': "
            f"ScalingConfig(num_workers=...) says how many ranks there are."
        )


@cache
def _end_group_of_ray() -> None:
    """End, once in a process, the plain group of Ray Train, where nobody hears of a lost rank."""
    if dist.is_initialized():
        dist.destroy_process_group()
