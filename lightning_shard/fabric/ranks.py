"""What a strategy of Fabric knows of its ranks: which they are, how they start and exchange.

They are processes, or threads of this process:

fabric.launch()           processes: the script is run again for each, and goes on on all ranks
fabric.launch(train, x)   processes as well; threads: rank 0 runs on x, the others on copies

Ranks that are threads run copies of the function and its arguments: one deep copy for each rank, of
everything at once, so that what was one object stays one: the Fabric, its callbacks, modules,
optimizers and what else is passed or in the function's closure. Not copied are map-style datasets,
loggers and the standard streams. A function's module has its globals once: what is found there is
every rank's, and set up by one only.

The options are the same groups as a Trainer's strategies take.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar, Unpack

import torch
import torch.distributed as dist
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.utilities.seed import reset_seed
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import TypedDict, override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.in_process import World, current_world
from lightning_shard.backends.in_process.faults import faults_to_inject
from lightning_shard.errors import ConfigError
from lightning_shard.fabric._lightning import Launcher, fabric_of, has_no_function
from lightning_shard.launchers._copy import held_by
from lightning_shard.launchers.loggers import told_once
from lightning_shard.launchers.processes import ProcessLauncher
from lightning_shard.launchers.replicas import copy_for_rank, memo_of
from lightning_shard.strategies.configs import RanksConfig
from lightning_shard.strategies.flat_options import OptionNames, part, takes
from lightning_shard.strategies.joining import LocalRanks, OnLocalRanks, check_num_nodes
from lightning_shard.strategies.names import check_interactive
from lightning_shard.strategies.options import GradientOptions, RanksOptions, ShardOptions
from lightning_shard.trainer.gathered_tensors import gathered, reduce_op_name, reduced
from lightning_shard.trainer.same_settings import check_same_settings, common_seed

Call = tuple[Callable[..., Any], list[Any], dict[str, Any]]
T = TypeVar("T")


class FabricLightningOptions(TypedDict, total=False):
    """What Fabric's own parallel strategies take.

    Attributes:
        accelerator: Lightning's; Fabric sets it.
        parallel_devices: One device per local rank; Fabric sets them.
        cluster_environment: Lightning's; Fabric finds it when it is left out.
        checkpoint_io: Lightning's; it writes and reads the files.
        precision: Lightning's plugin; Fabric makes it of its own `precision`.
    """

    accelerator: Accelerator | None
    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    checkpoint_io: CheckpointIO | None
    precision: Precision | None


class FabricRanksOptions(FabricLightningOptions, RanksOptions, total=False):
    """What every strategy of Fabric takes."""


class FabricOptions(FabricRanksOptions, GradientOptions, ShardOptions, total=False):
    """What replicated data parallel and ZeRO take under Fabric."""


class FabricProcessLauncher(Launcher):
    """Starts the other ranks as processes that run the same script.

    Args:
        launcher: The launcher of processes.
    """

    def __init__(self, launcher: ProcessLauncher) -> None:
        super().__init__()
        self._launcher = launcher

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self._launcher.is_interactive_compatible

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the other ranks, unless a launcher outside has, and run `function` here."""
        return self._launcher.launch(partial(function, *args, **kwargs))


class FabricThreadLauncher(Launcher):
    """Runs a function on every rank of an in-process world.

    Args:
        num_ranks: Number of ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self._num_ranks = num_ranks

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function(*args, **kwargs)` on every rank and return rank 0's result.

        Rank 0 runs on this thread and on the originals, which are full afterwards.

        Raises:
            ConfigError: There is no function, or an object cannot be copied.
            BaseException: The error of the first rank to fail, with a note that names the rank.
        """
        if has_no_function(function) and self._num_ranks > 1:
            raise ConfigError(
                f"fabric.launch() was called without a function, but the {self._num_ranks} ranks "
                f"of the backend 'in_process' are threads, expected the function that each runs. "
                f"Call fabric.launch(train), where train(fabric) sets up and trains."
            )
        if current_world() is not None:
            raise ConfigError(
                "fabric.launch was called inside an in-process world, whose ranks are threads "
                "already; expected a call outside of it. Launch once, around all that the ranks do."
            )
        call = (function, list(args), kwargs)
        others = [_copy(*call) for _ in range(self._num_ranks - 1)]
        calls = [partial(_run, *one) for one in (call, *others)]
        faults, struck = faults_to_inject()
        world = World(self._num_ranks, faults, struck=struck)
        with told_once(fabric_of(function)):
            return world.run(lambda thread: calls[thread]())[0]


def _run(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a rank's function, and make full what it leaves in shards; each rank must call."""
    fabric = fabric_of(function)
    try:
        result = function(*args, **kwargs)
        if fabric is not None:
            fabric.strategy.end_launch(restore=True)
    except BaseException:
        if fabric is not None:
            fabric.strategy.end_launch(restore=False)
        raise
    return result


def _copy(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Call:
    """Return a copy of a call, with objects of its own; `args` may get other iterators."""
    reached = list(_reached([function, args, kwargs], set()))
    modules = [one for one in reached if isinstance(one, nn.Module)]
    others = [one for one in reached if not isinstance(one, nn.Module)]
    owners = {f"{type(one).__name__} {number}": one for number, one in enumerate(modules)}
    fabric = fabric_of(function)
    memo = memo_of(fabric, owners, reached)
    own = function.args[0] if isinstance(function, partial) else function
    outer = inspect.getclosurevars(own).nonlocals if isinstance(own, FunctionType) else {}
    named = {id(value): name for name, value in {**owners, **kwargs, **outer}.items()}
    call = (function, args, kwargs)
    copied: Call = copy_for_rank(call, memo, modules, others, named, "the launched function")
    return copied


def _reached(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield modules, optimizers and whatever has state of its own that a call reaches."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (nn.Module, Optimizer)):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _reached(one, seen)
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            yield from _reached(one, seen)
    elif isinstance(value, MethodType):
        yield value.__self__
        yield from _reached(value.__func__, seen)
    else:
        if hasattr(value, "__dict__") and not isinstance(value, (FunctionType, type)):
            yield value
        for one in held_by(value):
            yield from _reached(one, seen)


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
