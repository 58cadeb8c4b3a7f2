"""The options of the strategies: each is declared and explained here or in its room, once.

A scheme takes the groups that make sense for it, and its own; how they become arguments of a
constructor is told in `core.options`.
"""

import difflib
import inspect
from abc import ABCMeta
from dataclasses import dataclass
from datetime import timedelta
from inspect import Parameter
from typing import Annotated, Any, Literal, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.fabric.accelerators.accelerator import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.pytorch.plugins.precision import Precision

from lightning_shard.backends.base import DEFAULT_TIMEOUT
from lightning_shard.backends.registry import get_backend
from lightning_shard.core.mesh import AXES, KnownAxis, ParallelMesh
from lightning_shard.core.options import AtLeastOne, AtLeastZero, Limit, Options, explained
from lightning_shard.data_parallel.async_sgd.async_sgd import StalenessRule
from lightning_shard.data_parallel.compression import Compression, find_compressor
from lightning_shard.data_parallel.local_sgd.rules import OuterOptimizer, SyncSchedule
from lightning_shard.data_parallel.options import (
    EngineOptions,
    ShardOptions,
    SumOptions,
    UnitOptions,
    WireOptions,
    ZeroStage,
)
from lightning_shard.elastic.membership.membership_table import Bounds
from lightning_shard.errors import ConfigError
from lightning_shard.on_pytorch_lightning.mirror import original
from lightning_shard.precision.policy import dtype_policy
from lightning_shard.strategies.dimensions.context import ContextAxis, ContextOptions
from lightning_shard.strategies.dimensions.experts import ExpertAxis
from lightning_shard.strategies.dimensions.pipeline import PipelineAxis, PipelineOptions
from lightning_shard.strategies.dimensions.tensor import TensorAxis, TensorOptions
from lightning_shard.strategies.groups import DataParallelSize

_LONGEST = timedelta(days=365)  # torch counts milliseconds
_COLLECTING = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _wait(timeout: float | timedelta) -> timedelta:
    try:
        return timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    except OverflowError:
        return timedelta(0)


ReduceDType = Literal["float32", "bfloat16", "float16"]
CheckpointFormat = Literal["full", "sharded"]
AfterFit = bool | Literal["auto"]
ElasticScheme: TypeAlias = Annotated[
    Literal["shard_ddp", "zero1", "zero2", "zero3"],
    Limit("(the ranks of other schemes have parts of layers, without which the rest cannot go on)"),
]
BackendName: TypeAlias = Annotated[
    str, Limit("that names a backend", lambda name: name == "auto" or bool(get_backend(name)))
]
Timeout: TypeAlias = Annotated[
    float | timedelta,
    Limit(
        f"above 0 and of at most {_LONGEST.days} days",
        lambda timeout: timedelta(0) < _wait(timeout) <= _LONGEST,
    ),
]
Patience: TypeAlias = Annotated[float, Limit("of at least 0 seconds", lambda wait: wait >= 0)]
_STAGES: dict[str, int] = {"shard_ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}


@dataclass(frozen=True)
class LightningOptions(Options):
    """What Lightning's own parallel strategies take.

    Attributes:
        accelerator: Lightning's; the Trainer sets it.
        parallel_devices: One device per local rank; the Trainer sets them.
        cluster_environment: Lightning's; the Trainer finds it when it is left out.
        checkpoint_io: Lightning's; it writes and reads the files.
        precision_plugin: Lightning's; it is exchanged for a twin that works on shards.
    """

    accelerator: "pl.accelerators.Accelerator | None" = None
    parallel_devices: list[torch.device] | None = None
    cluster_environment: ClusterEnvironment | None = None
    checkpoint_io: CheckpointIO | None = None
    precision_plugin: Precision | None = None


@dataclass(frozen=True, kw_only=True)
class RanksOptions(Options):
    """What every strategy takes, for a Trainer and for Fabric.

    Attributes:
        backend: "nccl", "gloo", "mpi", "shm" or "in_process"; or "auto": NCCL on GPUs; shared
            memory between CPU ranks of one host, Gloo over several.
        num_ranks: Ranks to run inside this process, with backend "in_process" only; by default the
            number of devices.
        timeout: Seconds (or a timedelta) after which a silent peer is an error, by default 30
            minutes.
        debug: Let ranks compare every collective call before they make it, so that a mistake is an
            error that names both call sites. Slow. On as well when LIGHTNING_SHARD_DEBUG is 1, and
            always within one process.
        checkpoint_format: "full", one file as a single device writes it, which rank 0 gathers; or
            "sharded", a folder to which each rank writes what it has. Either loads, whatever is
            set here.
    """

    backend: BackendName = "auto"
    num_ranks: AtLeastOne | None = None
    timeout: Timeout = DEFAULT_TIMEOUT
    debug: bool = False
    checkpoint_format: CheckpointFormat = "full"

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        super().__post_init__()
        if self.num_ranks is not None and self.backend != "in_process":
            raise ConfigError(
                f"num_ranks={self.num_ranks} sets the ranks of the backend 'in_process', but the "
                f"backend is {self.backend!r}. Pass Trainer(devices={self.num_ranks}), or a "
                f"strategy name that ends in '_in_process'."
            )

    @property
    def longest_wait(self) -> timedelta:
        """Return the longest wait for a peer: the timeout."""
        return _wait(self.timeout)


@dataclass(frozen=True, kw_only=True)
class RunOptions(RanksOptions, LightningOptions):
    """What every strategy of a Trainer takes.

    Attributes:
        announce: Say in one line, when a fit starts, what runs and what each rank will hold.
        save_trainable_only: Save no parameters that are frozen (`requires_grad=False`), such as
            the base of an adapter; buffers are saved. A run that loads such a checkpoint keeps
            its own values of them.
        save_on_sigterm: Save a fit that SIGTERM ends as `last-sigterm.ckpt` beside the files of the
            trainer's `ModelCheckpoint`, unless a callback saves on the exception.
        async_save: Let training go on while checkpoints of a fit are written: each rank copies
            what it has to host memory, which a thread writes. For the sharded format.
    """

    announce: bool = True
    save_trainable_only: bool = False
    save_on_sigterm: bool = True
    async_save: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        super().__post_init__()
        if self.async_save and self.checkpoint_format != "sharded":
            raise ConfigError(
                f"async_save=True writes what each rank has in the background, but with "
                f"checkpoint_format={self.checkpoint_format!r} rank 0 gathers all of it first. Set "
                f"checkpoint_format='sharded' beside it."
            )


@dataclass(frozen=True, kw_only=True)
class GradientOptions(SumOptions, UnitOptions):
    """How the gradients of data-parallel ranks travel.

    Attributes:
        reduce_dtype: Format in which gradients travel between data-parallel ranks; that of
            backward when left out.
    """

    reduce_dtype: ReduceDType | None = None


@dataclass(frozen=True, kw_only=True)
class SharedOptions(GradientOptions, RunOptions):
    """What all strategies share whose ranks average gradients."""


@dataclass(frozen=True, kw_only=True)
class FitEndOptions(Options):
    """What a fit leaves on its ranks.

    Attributes:
        full_parameters_after_fit: Whether each rank has the full parameters after a fit whose
            ranks had shards. False leaves the shards, for `trainer.save_checkpoint` and further
            runs (up to stage 2, where parameters are full anyway, those of the optimizers' states);
            "auto" does so where the full state would not fit into the memory that is free then.
            Ranks of one process end with the fit: True there.
    """

    full_parameters_after_fit: AfterFit = "auto"


@dataclass(frozen=True, kw_only=True)
class SplitOptions(FitEndOptions, SharedOptions):
    """What all strategies share whose ranks keep shards between the steps of a fit."""


@dataclass(frozen=True, kw_only=True)
class SentOptions(ShardOptions, GradientOptions):
    """How the ranks of data parallel and ZeRO share a step, for a Trainer and for Fabric."""

    def engine_options(self, stage: int) -> EngineOptions:
        """Return what an engine of a stage is told, with dtypes of the precision "32-true"."""
        given = {
            **self.part(EngineOptions),
            "dtypes": dtype_policy("32-true", self.reduce_dtype),
            "compression": find_compressor(self.compression),
        }
        return EngineOptions(stage=stage, **given)


@dataclass(frozen=True, kw_only=True)
class DataParallelOptions(SentOptions, SplitOptions):
    """What replicated data parallel and ZeRO take."""


@dataclass(frozen=True)
class FabricLightningOptions(Options):
    """What Fabric's own parallel strategies take.

    Attributes:
        accelerator: Lightning's; Fabric sets it.
        parallel_devices: One device per local rank; Fabric sets them.
        cluster_environment: Lightning's; Fabric finds it when it is left out.
        checkpoint_io: Lightning's; it writes and reads the files.
        precision: Lightning's plugin; Fabric makes it of its own `precision`.
    """

    accelerator: Accelerator | None = None
    parallel_devices: list[torch.device] | None = None
    cluster_environment: ClusterEnvironment | None = None
    checkpoint_io: CheckpointIO | None = None
    precision: FabricPrecision | None = None


@dataclass(frozen=True, kw_only=True)
class FabricOptions(SentOptions, RanksOptions, FabricLightningOptions):
    """What replicated data parallel and ZeRO take under Fabric.

    Attributes:
        num_micro_batches: Batches that each rank sends backward for a step; `same_bits` counts
            them.
    """

    num_micro_batches: AtLeastOne = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        super().__post_init__()
        if self.num_micro_batches > 1 and not self.same_bits:
            raise ConfigError(
                f"num_micro_batches={self.num_micro_batches} counts the backwards of a step for "
                f"same_bits=True, which is not set. Leave it out, or set same_bits."
            )


@dataclass(frozen=True, kw_only=True)
class TensorParallelOptions(TensorOptions, SplitOptions):
    """What tensor parallelism takes, with what all strategies share."""


@dataclass(frozen=True, kw_only=True)
class PipelineParallelOptions(PipelineOptions, SplitOptions):
    """What pipeline parallelism takes, with what all strategies share."""


@dataclass(frozen=True, kw_only=True)
class ContextParallelOptions(ContextOptions, SplitOptions):
    """What context parallelism takes, with what all strategies share."""


@dataclass(frozen=True, kw_only=True)
class HybridParallelOptions(
    TensorAxis, ExpertAxis, ContextAxis, PipelineAxis, WireOptions, SplitOptions
):
    """What data parallelism takes beside the dimensions, in the order in which they split a model.

    Attributes:
        data_parallel_size: Models that train on different batches; -1 takes the remaining ranks. A
            pair (replicate, shard) is so many copies of the state, each in shards on so many
            neighbouring ranks; choose those of a node, and gathers stay inside it.
        zero_stage: ZeRO stage, 0 to 3: how the data-parallel ranks keep their state. Stage 3
            gathers each layer for every microbatch's forward and backward, each half of it where
            those are apart.
        axis_order: The axes "pp", "dp" and "tp" from the slowest to the fastest; where they
            are not named, "ep" comes after "dp" and "cp" before "tp".
    """

    data_parallel_size: DataParallelSize = -1
    zero_stage: ZeroStage = 1
    axis_order: tuple[KnownAxis, ...] = AXES

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        super().__post_init__()
        ParallelMesh(axis_order=self.axis_order)
        if not isinstance(self.data_parallel_size, int):
            for one in self.dimensions():
                one.check_copies(self.data_parallel_size)


@dataclass(frozen=True, kw_only=True)
class AutoOptions(FitEndOptions, RunOptions):
    """What the strategy takes that plans at the beginning of a fit.

    Attributes:
        machine: Profile that times are compared with: the name of a published one, the path of a
            file, or "auto", which goes by the name of the GPU.
        device_memory: Bytes of a device; by default nine tenths of what is free when the fit
            begins, of a host's memory each rank's part.
        tensor_plan: Layers that tensor parallel may split, as the option `plan` of
            `tensor_parallel` has them; by default they are found.
        choice_file: File in the run's log folder to which the choice is written, as a config; None
            writes none. What was predicted is written beside it, as `plan.json`.
    """

    machine: str = "auto"
    device_memory: AtLeastOne | None = None
    tensor_plan: dict[str, Any] | None = None
    choice_file: str | None = "shard_auto.yaml"


@dataclass(frozen=True, kw_only=True)
class LocalSGDOptions(SyncSchedule, SharedOptions):
    """What local SGD and DiLoCo take; units, buckets and `reduce_dtype` are those of the warm-up.

    Attributes:
        outer_optimizer: None averages parameters. "nesterov", {"class_path": ..., "init_args":
            ...} or a function of a list of tensors is DiLoCo's outer optimizer, whose gradient is
            the mean of what the ranks have changed.
        compression: Compression of the changes that ranks send when they meet: "fp16", "bf16",
            "int8", "int4", "topk", "powersgd", a compressor, or
            {"class_path": ..., "init_args": ...}.
    """

    outer_optimizer: OuterOptimizer = None
    compression: Compression = None

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        super().__post_init__()
        if self.same_bits:
            raise ConfigError(
                "same_bits=True adds up the gradients of each step, but local SGD and DiLoCo let "
                "ranks train apart. Use strategy='shard_ddp' or ZeRO."
            )


@dataclass(frozen=True, kw_only=True)
class AsyncSGDOptions(UnitOptions, RunOptions):
    """What asynchronous SGD takes; `bucket_mb` is of synchronous steps.

    Attributes:
        staleness_bound: Steps that a rank may be ahead of the oldest part of the parameters that it
            uses. 0 is synchronous training.
        staleness_lr: Each gradient counts for 1 / N of the learning rate. "inverse": one that comes
            k > 1 rounds of N gradients after its parameters counts for 1 / (k N). None: all alike.
        warmup_steps: Synchronous steps at the beginning. The first ones suffer most from old
            gradients, since parameters move fastest and Adam's averages begin.
    """

    staleness_bound: AtLeastZero = 4
    staleness_lr: StalenessRule | None = "inverse"
    warmup_steps: AtLeastZero = 0


@dataclass(frozen=True, kw_only=True)
class ElasticOptions(SharedOptions):
    """What elastic training takes; a peer that is silent for `timeout` seconds is taken for lost.

    Attributes:
        scheme: "shard_ddp", "zero1", "zero2" or "zero3".
        min_ranks: Ranks that training needs: with fewer it waits for `patience` seconds, then saves
            and ends.
        max_ranks: Ranks that train at most: further newcomers wait until there is room; None
            admits all.
        snapshot_every: Optimizer steps between the boundaries that ranks remember: at most so many
            are done again after a loss. "shard_ddp" loses none but between an update and the end of
            its step.
        global_batch_size: Samples of an optimizer step, whatever the number of ranks, from which
            accumulation follows; None keeps what `devices` x `num_nodes` ranks have together.
        learning_rate_scaling: "linear" or "sqrt": let the batch of each rank stay as it is, and
            scale the learning rate from `devices` x `num_nodes` ranks to those there are; None
            holds the global batch instead.
        max_failures: Errors of its own that a rank may raise: with one more it is evicted.
        patience: Seconds to wait below `min_ranks`.
    """

    scheme: ElasticScheme = "zero2"
    min_ranks: AtLeastOne = 1
    max_ranks: AtLeastOne | None = None
    snapshot_every: AtLeastOne = 10
    global_batch_size: AtLeastOne | None = None
    learning_rate_scaling: Literal["linear", "sqrt"] | None = None
    max_failures: AtLeastZero = 3
    patience: Patience = 60.0

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        super().__post_init__()
        if self.max_ranks is not None and self.max_ranks < self.min_ranks:
            raise ConfigError(
                f"Expected 1 <= min_ranks <= max_ranks, got min_ranks={self.min_ranks} and "
                f"max_ranks={self.max_ranks}."
            )
        batch, scaling = self.global_batch_size, self.learning_rate_scaling
        if scaling is not None and batch is not None:
            raise ConfigError(
                f"learning_rate_scaling={scaling!r} lets the global batch change with the ranks, "
                f"but global_batch_size={batch} holds it. Leave one of them out."
            )
        if self.same_bits and (self.stage < 2 or scaling is not None):
            raise ConfigError(
                f"same_bits=True lets any number of ranks have any number of a step's "
                f"micro-batches, got scheme={self.scheme!r} and learning_rate_scaling={scaling!r}, "
                f"expected 'zero2' or 'zero3', which add up each micro-batch by itself, and a "
                f"global batch that is held."
            )

    @property
    def stage(self) -> int:
        """The scheme's ZeRO stage."""
        return _STAGES[self.scheme]

    @property
    def bounds(self) -> Bounds:
        """How many ranks may train, how long too few wait, and how often one may fail."""
        return Bounds(
            min_ranks=self.min_ranks,
            max_ranks=self.max_ranks,
            patience_seconds=self.patience,
            max_failures=self.max_failures,
        )


def option_names(kind: type) -> list[str]:
    """Return the names of a class's options; of one that passes others on, its parents', too."""
    names: dict[str, None] = {}
    for one in kind.__mro__:
        if "__init__" not in vars(one):
            continue
        parameters = list(inspect.signature(vars(one)["__init__"]).parameters.values())[1:]
        names |= {each.name: None for each in parameters if each.kind not in _COLLECTING}
        if all(each.kind is not Parameter.VAR_KEYWORD for each in parameters):
            break
    return list(names)


class OptionNames(ABCMeta):
    """Checks keyword arguments by the constructor's signature; keeps them as `given_options`."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        """Make a strategy's class, whose options may be those of a base."""
        made: Any = super().__new__(cls, name, bases, namespace)
        made.__doc__ = explained(namespace.get("__doc__"), made.__init__)
        shown = inspect.signature(made.__init__)
        made.__signature__ = shown.replace(parameters=list(shown.parameters.values())[1:])
        return made

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct, or raise ConfigError for an option that the class does not have."""
        known = option_names(cls)
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"{cls.__name__} has no option {name!r}; it has {', '.join(known)}.{hint}"
                )
        made = super().__call__(*args, **kwargs)
        made.given_options = args, kwargs
        return made

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or any(
            (original(kind.__module__), kind.__qualname__)
            == (original(cls.__module__), cls.__qualname__)
            for kind in type(instance).__mro__
        )
