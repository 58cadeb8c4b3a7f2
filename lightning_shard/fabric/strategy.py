"""Replicated data parallel and ZeRO stages 1 to 3 under Fabric: the engine's second adapter.

Averaging, clipping and the formats of parameters are the strategy's and the engine's: of Fabric's
precision plugins only a loss scaler has to know of the other ranks.

How the ranks of a strategy of Fabric start, as processes or as threads of this process.

    fabric.launch()           processes: the script is run again for each, and goes on on all
    fabric.launch(train, x)   processes as well; threads: rank 0 runs on x, the others on copies

A thread's copy is one deep copy of the function and its arguments, so that what was one object
stays one. Map-style datasets, loggers and the standard streams are not copied. A function's module
has its globals once: what is found there is every rank's, and set up by one only.
"""

import gc
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, update_wrapper
from types import FunctionType, MethodType
from typing import Any, ClassVar, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.fabric.strategies.parallel import ParallelStrategy
from lightning.fabric.utilities.seed import reset_seed
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.in_process.faults import faults_to_inject
from lightning_shard.backends.in_process.world import World, current_world
from lightning_shard.backends.registry import collectives_over
from lightning_shard.core.options import takes
from lightning_shard.data_parallel.agreement import check_same_optimizers
from lightning_shard.data_parallel.bucket_choice import BucketChoice, Links, choose
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.differentiation import asking
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.environments.launchers._copy import held_by
from lightning_shard.environments.launchers.processes import ProcessLauncher
from lightning_shard.environments.launchers.replicas import copy_for_rank, memo_of, told_once
from lightning_shard.errors import ConfigError
from lightning_shard.fabric._lightning import (
    BackwardSyncControl,
    EmptyInit,
    Launcher,
    fabric_of,
    has_no_function,
)
from lightning_shard.fabric.checkpoints import Loading, Saving
from lightning_shard.fabric.sharded_module import (
    Differentiation,
    HeldModule,
    ShardedModule,
    StepsInOrder,
    UsedEngines,
    engines_of,
)
from lightning_shard.optim.clipping import clip_grad_norm, clip_grad_value
from lightning_shard.optim.host_step import warn_of_cpu_ranks
from lightning_shard.precision.plugins import ShardedGradScaler, device_scale
from lightning_shard.precision.policy import dtype_policy
from lightning_shard.strategies.groups import with_secondary
from lightning_shard.strategies.joining import LocalRanks, OnLocalRanks, check_num_nodes
from lightning_shard.strategies.micro_batches import only_deterministic
from lightning_shard.strategies.options import FabricLightningOptions, FabricOptions, OptionNames
from lightning_shard.strategies.trainer.logs.experiments import shared_loggers
from lightning_shard.strategies.trainer.same_on_ranks import check_same_settings, common_seed
from lightning_shard.strategies.trainer.step_collectives import agreed, gathered, reduced

Call = tuple[Callable[..., Any], list[Any], dict[str, Any]]


class FabricProcessLauncher(Launcher):
    """Starts the other ranks as processes that run the same script."""

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
    """Runs a function on every rank of an in-process world."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self._num_ranks = num_ranks

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function on every rank, rank 0 here on the originals; return its result."""
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


T = TypeVar("T")
_KNOWN = (Precision, HalfPrecision, DoublePrecision, MixedPrecision)


def checked_plugin(plugin: Precision | None) -> Precision | None:
    """Return a plugin that works on shards, or raise ConfigError."""
    if plugin is None or type(plugin) in _KNOWN:
        return plugin
    raise ConfigError(
        f"The precision plugin {type(plugin).__name__} does not work on sharded models; use "
        f"Fabric(precision=...) with 32-true, 64-true, bf16-true, bf16-mixed, 16-true or 16-mixed."
    )


def share_scaler(
    plugin: Any,
    view: Callable[[], AbstractContextManager[None]],
    groups: Sequence[Collectives],
    device: torch.device,
) -> None:
    """Let a plugin's loss scaler see the overflows of all ranks, over which shards lie."""
    scaler = getattr(plugin, "scaler", None)
    if isinstance(scaler, ShardedGradScaler):  # of a launch before this one
        scaler = scaler.plain()
    if scaler is not None:
        plugin.scaler = ShardedGradScaler(scaler, view, groups, device)


class FabricStrategy(OnLocalRanks, ParallelStrategy, metaclass=OptionNames):
    """Each module that is set up has an engine; the user's loop runs between its steps.

    It starts the ranks, makes the process group, and answers Fabric's questions about them.

    Attributes:
        bucket_choice: What `bucket_mb="auto"` has come to for the last module that was set up.
        in_order: Counts micro-batches during a launch, where `same_bits` is set; else None.
    """

    stage: ClassVar[int]
    bucket_choice: BucketChoice | None = None
    in_order: StepsInOrder | None = None
    _collectives: Collectives | None = None
    _secondary: Collectives | None = None

    @takes(FabricOptions)
    def __init__(self, options: FabricOptions) -> None:
        self._reduce_dtype = options.reduce_dtype
        self._options = options.engine_options(self.stage)
        self._num_micro_batches = options.num_micro_batches
        self.held: list[HeldModule] = []
        self._differentiation, self._in_launch = Differentiation(), ExitStack()
        self.local_ranks = LocalRanks(options, "Fabric")
        self.checkpoint_format = options.checkpoint_format
        super().__init__(**options.part(FabricLightningOptions))
        self._backward_sync_control = BackwardSync()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process or rank."""
        own: dict[str, Any] = {"_collectives": None, "held": [], "_in_launch": ExitStack()}
        own["in_order"] = own["_secondary"] = None
        return {**vars(self), **own}

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self._take_place()
        self.local_ranks.enter_groups(self)
        self._collectives = self.backend.of_all_ranks(self.local_ranks.timeout)
        check_same_settings(self, self._collectives)
        common_seed(self._collectives)
        ranks, size = DataGroups.of(self._collectives), self._options.reshard_after_forward
        self._secondary = with_secondary(ranks, size, self).secondary
        self._in_launch.enter_context(asking(self._differentiation))
        self._in_launch.enter_context(shared_loggers())
        share_scaler(self.precision, self._all_views, [self.collectives], self.root_device)
        if self._options.same_bits:
            self._in_launch.enter_context(only_deterministic())
            self.in_order = StepsInOrder(
                self.collectives,
                self.root_device,
                stage=self.stage,
                num_own=self._num_micro_batches,
            )

    @override
    def leave(self) -> None:
        self.held = []  # nothing is taken off at exit
        super().leave()

    @override
    def forget_groups(self) -> None:
        """Take the engines off and refer to no group any more; each rank must call."""
        self.end_launch(restore=True)

    def end_launch(self, *, restore: bool) -> None:
        """Take the engines off at the end of a launch, and `restore` modules if all ranks call."""
        held, self.held = self.held, []
        for one in held:
            one.release(restore=restore)
        self._in_launch.close()
        self._collectives = self._secondary = self.in_order = None

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
        self.backend.check(self.root_device)
        if self.is_in_process:
            self._launcher = FabricThreadLauncher(self.num_processes)
        else:
            self._launcher = FabricProcessLauncher(self.processes())

    # --- collectives ------------------------------------------------------------------------------

    def _group(self, group: Any) -> Collectives:
        is_default = group is None or group == dist.group.WORLD
        return self.collectives if is_default else collectives_over(group, self.backend)

    @override
    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all ranks, in place as Fabric does; each rank must call.

        Returns:
            The tensor; of integers' averages a new one, in floats.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        result = reduced(tensor, reduce_op, self._group(group))
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
        if collectives.size == 1:
            return tensor
        return gathered(tensor, collectives, sync_grads=sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return agreed(decision, self.collectives, self.root_device, "min" if all else "max")

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._collectives is not None:
            self.collectives.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return self.collectives.broadcast_object(obj, src=src)

    # --- modules and optimizers -------------------------------------------------------------------

    @property
    @override
    def precision(self) -> Precision:
        return super().precision

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        self._precision = checked_plugin(precision)

    @override
    def module_to_device(self, module: nn.Module) -> None:
        empty = [name for name, param in module.named_parameters() if param.is_meta]
        if empty:
            raise ConfigError(
                f"{empty[0]!r} and {len(empty) - 1} more parameters of {type(module).__name__} are "
                f"on the device 'meta', without values, expected values to put into shards. Make "
                f"the module inside fabric.init_module(empty_init=True), set it up, and load a "
                f"checkpoint."
            )
        module.to(self.root_device)

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(self.root_device)
        stack.enter_context(self.precision.module_init_context())
        stack.enter_context(EmptyInit(enabled=bool(empty_init)))
        return stack

    @override
    def setup_module(self, module: nn.Module) -> ShardedModule:
        """Put a module into shards; each rank must call, with the same module."""
        return self._set_up(module, ())

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Put a module into shards, and let its optimizers update them; each rank must call."""
        wrapped = self._set_up(module, optimizers)
        for optimizer in optimizers:
            self.setup_optimizer(optimizer)
        return wrapped, optimizers, scheduler

    def _set_up(self, module: nn.Module, optimizers: Collection[Optimizer]) -> ShardedModule:
        if optimizers:
            check_same_optimizers(list(optimizers), module, self.collectives)
        self._give_back_unused()
        if self.in_order is not None:
            precision = str(self.precision.precision)
            self.in_order.check(module, precision, is_first=not self.held)
        held = HeldModule(
            module, optimizers, self._make_engine, options=self._options, rank=self.collectives.rank
        )
        warn_of_cpu_ranks(self._options, self.root_device)
        self.held.append(held)
        wrapped = ShardedModule(held, self._differentiation, self.in_order)
        held.wrapper = ref(wrapped)
        return wrapped

    def _give_back_unused(self) -> None:
        """Give modules back whose wrappers are gone on all ranks, each of which must call."""
        if not self.held:
            return
        gc.collect()  # ranks need not have noticed alike what nobody refers to any more
        gone = {number for number, one in enumerate(self.held) if one.wrapper() is None}
        gone = set.intersection(*self.collectives.all_gather_object(gone))
        for number in sorted(gone):
            self.held[number].release(restore=True)
        self.held = [one for number, one in enumerate(self.held) if number not in gone]

    def _make_engine(
        self, module: nn.Module, owned: Collection[nn.Parameter]
    ) -> DataParallelEngine:
        dtypes = dtype_policy(str(self.precision.precision), self._reduce_dtype)
        groups = replace(DataGroups.of(self.collectives), secondary=self._secondary)
        loss_scale = partial(device_scale, self.precision)
        options = replace(
            self._options,
            dtypes=dtypes,
            owned=owned,
            expects_edits=True,
            loss_scale=loss_scale,
            takes_newcomers=self._options.compression is None,
        )
        if options.bucket_mb == "auto":
            options = self._with_buckets(options, module, groups)
        engine = DataParallelEngine(module, groups, options)
        engine.count_micro_batches(None, divisor=groups.dp.size)  # a step is the sum of backwards
        return engine

    def _with_buckets(
        self, options: EngineOptions, module: nn.Module, groups: DataGroups
    ) -> EngineOptions:
        links = Links(
            groups=groups,
            reducing=groups,
            everybody=self.collectives,
            device=self.root_device,
            are_timed=not self.is_in_process,
        )
        self.bucket_choice = choose(options, module, links)
        return replace(options, bucket_mb=self.bucket_choice.mb)

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Let an optimizer of one module update shards; each must call, with the same one."""
        held = self._holder_of(optimizer)
        check_same_optimizers([optimizer], held.module, self.collectives)
        held.attach(optimizer)
        return optimizer

    def _holder_of(self, optimizer: Optimizer) -> HeldModule:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not all(any(one.holds(param) for one in self.held) for param in params):
            for one in self.held:
                one.follow_model()  # which may have been given them since
        holders = [next((one for one in self.held if one.holds(p)), None) for p in params]
        known = dict.fromkeys(one for one in holders if one is not None)
        if len(known) == 1 and None not in holders:
            return next(iter(known))
        found = " and ".join(type(one.module).__name__ for one in known) or "no module"
        strangers = holders.count(None)
        raise ConfigError(
            f"Rank {self.global_rank}: {type(optimizer).__name__} has parameters of {found} that "
            f"was set up, and {strangers} of none, expected those of one module alone. Make an "
            f"optimizer for each module, after fabric.setup_module or in fabric.setup(module, "
            f"optimizer), or set up one module that holds them all."
        )

    # --- a step -----------------------------------------------------------------------------------

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward and average gradients of the modules that it has come to; each must call."""
        engines = list(engines_of(self.held))
        used = UsedEngines(engines, self.collectives if engines else None)
        with ExitStack() as stack:
            stack.enter_context(self._differentiation.running())
            for number, engine in enumerate(engines):
                if self.in_order is not None:
                    stack.enter_context(self.in_order.backward(engine))
                stack.enter_context(engine.backward(partial(used.has, number)))
            super().backward(tensor, module, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Let an optimizer update shards; each rank must call."""
        result = super().optimizer_step(optimizer, **kwargs)
        if self.in_order is not None:
            self.in_order.end_step()
        return result

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        """Return what Fabric's loader iterates over."""
        return dataloader if self.in_order is None else self.in_order.dealt(dataloader)

    # --- states -----------------------------------------------------------------------------------

    @override
    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save a file, or a folder of shards; each rank must call."""
        for one in self.held:
            one.follow_model()
        Saving(self, state).save(path, storage_options, filter or {})

    @override
    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a file or a folder; each rank must call."""
        loading = Loading(self, path, weights_only)
        if isinstance(state, (nn.Module, Optimizer)):
            loading.into_object(state, strict=strict)
            return {}
        return loading.into(state, strict=strict) if state else loading.whole()

    @override
    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return a module's full state on every rank; each must call."""
        return (module.module if isinstance(module, ShardedModule) else module).state_dict()

    @override
    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        """Load a full state; each rank must call."""
        own = module.module if isinstance(module, ShardedModule) else module
        own.load_state_dict(state_dict, strict=strict)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's full state on every rank; each must call."""
        states = next((found for one in self.held if (found := one.state_of(optimizer))), None)
        return optimizer.state_dict() if states is None else states.full()

    @contextmanager
    def _all_views(self) -> Iterator[None]:
        """Show all optimizers their shards."""
        with ExitStack() as stack:
            for engine in engines_of(self.held):
                stack.enter_context(engine.optimizer_view())
            yield

    def _to_clip(self, optimizer: Optimizer) -> tuple[DataParallelEngine, list[nn.Parameter]]:
        self.precision.unscale_gradients(optimizer)
        engine = self._holder_of(optimizer).present_engine
        params: Any = self.precision.main_params(optimizer)
        return engine, list(params)

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the norm of the full gradient, which is returned; each rank must call."""
        engine, params = self._to_clip(optimizer)
        return clip_grad_norm(
            params, float(max_norm), engine, float(norm_type), error_if_nonfinite=error_if_nonfinite
        )

    @override
    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float | int
    ) -> None:
        """Clamp every element of the gradients; each rank must call."""
        engine, params = self._to_clip(optimizer)
        clip_grad_value(params, float(clip_val), engine)


# Lightning refuses all that is not `fabric.backward` where it finds another method than its own;
# `Differentiation` refuses less.
update_wrapper(FabricStrategy.backward, ParallelStrategy.backward, assigned=())


class BackwardSync(BackwardSyncControl):
    """Lets backwards only accumulate."""

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return the context in which the backwards of a module average nothing.

        Stages 2 and 3 reduce all the same, since that is what bounds their memory.
        """
        engine = module.held.engine if isinstance(module, ShardedModule) else None
        return engine.no_sync() if enabled and engine is not None else nullcontext()


class DDPStrategy(FabricStrategy):
    """Everything replicated; gradients are averaged. `Fabric(strategy="shard_ddp")`."""

    stage = 0


class ZeRO1Strategy(FabricStrategy):
    """Optimizer state in shards. `Fabric(strategy="zero1")`."""

    stage = 1


class ZeRO2Strategy(FabricStrategy):
    """Optimizer state and gradients in shards. `Fabric(strategy="zero2")`."""

    stage = 2


class ZeRO3Strategy(FabricStrategy):
    """Parameters, gradients and optimizer state in shards. `Fabric(strategy="zero3")`."""

    stage = 3
