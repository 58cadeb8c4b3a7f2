"""What a strategy of Fabric knows of its ranks: which they are, how they start and exchange."""

from typing import Any, TypeVar, Unpack

import torch
import torch.distributed as dist
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.utilities.seed import reset_seed
from torch import Tensor
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import ConfigError
from lightning_shard.fabric.launching import FabricProcessLauncher, FabricThreadLauncher
from lightning_shard.fabric.options import FabricLightningOptions, FabricRanksOptions
from lightning_shard.launchers.processes import ProcessLauncher
from lightning_shard.strategies.configs import RanksConfig
from lightning_shard.strategies.flat_options import part, takes
from lightning_shard.strategies.joining import LocalRanks, OnLocalRanks, check_num_nodes
from lightning_shard.strategies.names import check_interactive
from lightning_shard.strategies.option_names import OptionNames
from lightning_shard.trainer.gathered_tensors import gathered
from lightning_shard.trainer.logged_reductions import reduce_op_name, reduced
from lightning_shard.trainer.same_settings import check_same_settings, common_seed

T = TypeVar("T")


class RankedStrategy(OnLocalRanks, ParallelStrategy, metaclass=OptionNames):
    """Starts the ranks, makes the process group, and answers Fabric's questions about them.

    Raises:
        ConfigError: An unknown backend, or options that contradict each other.
    """

    @takes(RanksConfig, of=ParallelStrategy)
    def __init__(self, **options: Unpack[FabricRanksOptions]) -> None:
        run = RanksConfig.of(options)
        self._local_ranks = LocalRanks(run, "Fabric")
        self.checkpoint_format = run.checkpoint_format
        super().__init__(**part(FabricLightningOptions, options))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process or rank."""
        return {**vars(self), "_collectives": None}

    # --- which rank this is -----------------------------------------------------------------------

    @property
    def collectives(self) -> Collectives:
        """Collectives over all ranks; there once they are launched.

        Raises:
            ConfigError: They are not, or another rank's Fabric is used.
        """
        if self._collectives is None:
            raise ConfigError(
                "There are no ranks yet, expected them to be launched. Call fabric.launch() first; "
                "under the backend 'in_process' fabric.launch(train)."
            )
        if self.is_in_process and self._collectives.rank != self.global_rank:
            raise ConfigError(
                f"Rank {self.global_rank} uses the Fabric of rank {self._collectives.rank}, which "
                f"is a thread of this process, expected its own: the argument of the launched "
                f"function. Write def train(fabric): ..., and use that one."
            )
        return self._collectives

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _take_place(self) -> None:
        if self.is_in_process:
            check_num_nodes(self.num_nodes)
        self.set_world_ranks()

    @override
    def _configure_launcher(self) -> None:
        self._take_place()
        assert self.cluster_environment is not None
        self.backend.check(self.root_device)
        if self.is_in_process:
            self._launcher = FabricThreadLauncher(self.num_processes)
            return
        processes = ProcessLauncher(self.cluster_environment, self.num_processes, self.num_nodes)
        check_interactive(self, processes, self.num_processes)
        self._launcher = FabricProcessLauncher(processes)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self._take_place()
        self._enter_groups()
        group = dist.group.WORLD
        assert group is not None
        self._collectives = self.backend.collectives(group)
        check_same_settings(self, self._collectives)
        common_seed(self._collectives)

    # --- collectives ------------------------------------------------------------------------------

    def _group(self, group: Any) -> Collectives:
        is_default = group is None or group == dist.group.WORLD
        return self.collectives if is_default else self.backend.collectives(group)

    @override
    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all ranks, in place as Fabric does; each rank must call.

        Returns:
            The tensor; of integers' averages a new one, in floats.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        result = reduced(tensor, reduce_op_name(reduce_op), self._group(group))
        if result.dtype != tensor.dtype:
            return result
        with torch.no_grad():
            return tensor.copy_(result)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather over all ranks; each rank must call, with tensors of one shape.

        Returns:
            Shape (ranks, ...); the tensor itself where there is one rank.
        """
        collectives = self._group(group)
        return (
            tensor
            if collectives.size == 1
            else gathered(tensor, collectives, sync_grads=sync_grads)
        )

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        flag = torch.tensor(int(decision), device=self.root_device)
        self.collectives.all_reduce(flag, "min" if all else "max").wait()
        return bool(flag)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._collectives is not None:
            self.collectives.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return self.collectives.broadcast_object(obj, src=src)
