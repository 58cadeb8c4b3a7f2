"""The groups of options with their defaults, and what values cannot be, by themselves or together.

What the options mean is said once, in `options`, where callers and their editors see them. Types
are checked before a group is made, see `flat_options`; here is what a value of its type cannot be.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

from lightning_shard.backends.base import DEFAULT_TIMEOUT
from lightning_shard.backends.registry import get_backend
from lightning_shard.core.mesh import AXES, Axis, ParallelMesh
from lightning_shard.data_parallel.async_sgd.async_sgd import StalenessRule
from lightning_shard.data_parallel.bucket_sizes import BucketMB
from lightning_shard.data_parallel.compression import Compressor, find_compressor
from lightning_shard.data_parallel.local_sgd.outer import OuterOptimizer
from lightning_shard.data_parallel.local_sgd.schedule import SyncSchedule
from lightning_shard.data_parallel.options import STAGES, EngineOptions, Offload
from lightning_shard.data_parallel.recompute.checkpointed_blocks import ActivationCheckpointing
from lightning_shard.elastic.membership.membership_table import Bounds
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.batch_reading import BatchLists
from lightning_shard.pipeline_parallel.partition import Split
from lightning_shard.pipeline_parallel.schedules import check_name
from lightning_shard.precision.policy import dtype_policy
from lightning_shard.strategies.dimensions.pipeline import PipelineDimension
from lightning_shard.strategies.dimensions.stage_options import StageOptions
from lightning_shard.strategies.dimensions.tensor import TensorDimension
from lightning_shard.strategies.flat_options import OptionGroup
from lightning_shard.strategies.hybrid_sharding import DataParallelSize, checked_size
from lightning_shard.strategies.options import (
    AfterFit,
    CheckpointFormat,
    ElasticScheme,
    ReduceDType,
)

_LONGEST = timedelta(days=365)  # torch counts milliseconds
_STAGES: dict[ElasticScheme, int] = {"shard_ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}


@dataclass(frozen=True, kw_only=True)
class RanksConfig(OptionGroup):
    """The options that every strategy takes, for a Trainer and for Fabric; see `RanksOptions`.

    Raises:
        ConfigError: An unknown backend, or options that contradict each other.
    """

    backend: str = "auto"
    num_ranks: int | None = None
    timeout: float | timedelta = DEFAULT_TIMEOUT
    debug: bool = False
    checkpoint_format: CheckpointFormat = "full"

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.backend != "auto":
            get_backend(self.backend)
        if self.checkpoint_format not in get_args(CheckpointFormat):
            raise ConfigError(
                f"checkpoint_format must be one of {', '.join(get_args(CheckpointFormat))}, got "
                f"{self.checkpoint_format!r}."
            )
        if not timedelta(0) < self.longest_wait <= _LONGEST:
            raise ConfigError(
                f"timeout must be positive seconds, and at most {_LONGEST.days} days, got "
                f"{self.timeout!r}."
            )
        if self.num_ranks is not None and self.backend != "in_process":
            raise ConfigError(
                f"num_ranks={self.num_ranks} sets the ranks of the backend 'in_process', but the "
                f"backend is {self.backend!r}. Pass Trainer(devices={self.num_ranks}), or a "
                f"strategy name that ends in '_in_process'."
            )
        if self.num_ranks is not None and self.num_ranks < 1:
            raise ConfigError(f"num_ranks must be at least 1, got {self.num_ranks}.")

    @property
    def longest_wait(self) -> timedelta:
        """Return the longest wait for a peer: the timeout."""
        if isinstance(self.timeout, timedelta):
            return self.timeout
        try:
            return timedelta(seconds=self.timeout)
        except OverflowError:
            return timedelta(0)


@dataclass(frozen=True, kw_only=True)
class RunConfig(RanksConfig):
    """The options that every strategy of a Trainer takes; see `RunOptions`.

    Raises:
        ConfigError: An unknown backend, or options that contradict each other.
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
class UnitConfig(OptionGroup):
    """The options of units, which ranks communicate as one; see `UnitOptions`."""

    units: list[str] | None = None
    bucket_mb: BucketMB = None
    activation_checkpointing: ActivationCheckpointing | None = None
    activation_offload: bool = False


@dataclass(frozen=True, kw_only=True)
class GradientConfig(UnitConfig):
    """The options of how gradients travel; see `GradientOptions`."""

    reduce_dtype: ReduceDType | None = None


@dataclass(frozen=True, kw_only=True)
class FitEndConfig(OptionGroup):
    """What a fit leaves on its ranks; see `FitEndOptions`.

    Raises:
        ConfigError: It is neither a flag nor "auto".
    """

    full_parameters_after_fit: AfterFit = "auto"

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.full_parameters_after_fit not in (True, False, "auto"):
            raise ConfigError(
                f"full_parameters_after_fit must be True, False or 'auto', got "
                f"{self.full_parameters_after_fit!r}."
            )


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig(GradientConfig):
    """Replicated data parallel and ZeRO; see `DataParallelOptions`."""

    compression: str | Compressor | dict[str, Any] | None = None
    offload: Offload | None = None
    prefetch: int | None = None

    def engine_options(self, stage: int) -> EngineOptions:
        """Return what an engine of a stage is told, with dtypes of the precision "32-true"."""
        return EngineOptions(
            stage=stage,
            units=self.units,
            bucket_mb=self.bucket_mb,
            dtypes=dtype_policy("32-true", self.reduce_dtype),
            compression=find_compressor(self.compression),
            activation_checkpointing=self.activation_checkpointing,
            activation_offload=self.activation_offload,
            offload=self.offload,
            prefetch=self.prefetch,
        )


@dataclass(frozen=True, kw_only=True)
class AutoConfig(OptionGroup):
    """Planning at the beginning of a fit; see `AutoOptions`.

    Raises:
        ConfigError: A device without memory.
    """

    machine: str = "auto"
    device_memory: int | None = None
    tensor_plan: dict[str, Any] | None = None
    choice_file: str | None = "shard_auto.yaml"

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.device_memory is not None and self.device_memory < 1:
            raise ConfigError(f"device_memory must be positive bytes, got {self.device_memory}.")


@dataclass(frozen=True, kw_only=True)
class PlanConfig(OptionGroup):
    """The options of how layers are split; see `PlanOptions`.

    Raises:
        ConfigError: It is no plan.
    """

    plan: dict[str, Any] | str | None = "auto"

    def __post_init__(self) -> None:
        """Refuse what is no plan."""
        if isinstance(self.plan, str) and self.plan != "auto":
            raise ConfigError(f"plan must be 'auto' or map patterns to styles, got {self.plan!r}.")
        if self.plan == {}:
            raise ConfigError("plan is empty, expected patterns and styles, or 'auto'.")

    def dimension(self, size: int | None, *, sequence_parallel: bool = False) -> TensorDimension:
        """Return what splits the layers over `size` ranks, over all where that is None."""
        return TensorDimension(size, plan=self.plan, sequence_parallel=sequence_parallel)


@dataclass(frozen=True, kw_only=True)
class TensorParallelConfig(PlanConfig):
    """Tensor parallelism; see `TensorParallelOptions`.

    Raises:
        ConfigError: A stage or plan that cannot be.
    """

    tensor_parallel_size: int | None = None
    zero_stage: int = 0
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        super().__post_init__()
        _check_stage(self.zero_stage)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(OptionGroup):
    """A pipeline's stages and schedule; see `ScheduleOptions`.

    Raises:
        ConfigError: A schedule or split that cannot be.
    """

    schedule: str = "1f1b"
    num_microbatches: int | None = None
    blocks: str | None = None
    split: str | list[int] = "parameters"
    batch_lists: BatchLists = "auto"

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        check_name(self.schedule)
        if isinstance(self.split, str) and self.split not in get_args(Split):
            raise ConfigError(
                f"split must be one of {', '.join(map(repr, get_args(Split)))}, or the first block "
                f"of each stage but the first, got {self.split!r}."
            )
        if self.batch_lists not in get_args(BatchLists):
            raise ConfigError(
                f"batch_lists must be one of {', '.join(get_args(BatchLists))}, got "
                f"{self.batch_lists!r}."
            )
        if self.num_microbatches is not None and self.num_microbatches < 1:
            raise ConfigError(f"num_microbatches must be at least 1, got {self.num_microbatches}.")

    def dimension(self, size: int | None, *, recomputes: bool = False) -> PipelineDimension:
        """Return what cuts a model into the stages of `size` ranks, of all where that is None.

        Args:
            size: Ranks of one pipeline.
            recomputes: Whether activations are computed again in backward.
        """
        options = StageOptions(
            schedule=self.schedule,
            num_microbatches=self.num_microbatches,
            blocks=self.blocks,
            split=self.split,
            batch_lists=self.batch_lists,
            joins_halves=recomputes,
        )
        return PipelineDimension(size, options)


@dataclass(frozen=True, kw_only=True)
class PipelineParallelConfig(ScheduleConfig):
    """Pipeline parallelism; see `PipelineParallelOptions`."""

    pipeline_parallel_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class ContextParallelConfig(OptionGroup):
    """Context parallelism; see `ContextParallelOptions`.

    Raises:
        ConfigError: A stage that cannot be.
    """

    context_parallel_size: int | None = None
    zero_stage: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        _check_stage(self.zero_stage)


@dataclass(frozen=True, kw_only=True)
class HybridParallelConfig(OptionGroup):
    """The mesh of data, tensor and pipeline parallelism; see `HybridParallelOptions`.

    Raises:
        ConfigError: A pair of sizes, a stage or an order of axes that cannot be.
    """

    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    data_parallel_size: DataParallelSize = -1
    zero_stage: int = 1
    axis_order: tuple[Axis, ...] = AXES

    def __post_init__(self) -> None:
        """Refuse what cannot be, and make tuples of the lists of YAML."""
        object.__setattr__(self, "data_parallel_size", checked_size(self.data_parallel_size))
        object.__setattr__(self, "axis_order", tuple(self.axis_order))
        ParallelMesh(axis_order=self.axis_order)
        if self.expert_parallel_size != 1 and not isinstance(self.data_parallel_size, int):
            raise ConfigError(
                f"data_parallel_size={self.data_parallel_size} makes several copies of the state, "
                f"but with expert_parallel_size={self.expert_parallel_size} experts and other "
                f"parameters are on different ranks; expected a number. Leave the pair out."
            )
        _check_stage(self.zero_stage)


@dataclass(frozen=True, kw_only=True)
class LocalSGDConfig(OptionGroup):
    """Local SGD and DiLoCo; see `LocalSGDOptions`."""

    sync_every: int = 10
    warmup_steps: int = 0
    outer_optimizer: OuterOptimizer = None
    fragments: int = 1
    overlap_steps: int = 0
    mixing: float | None = None
    compression: str | Compressor | dict[str, Any] | None = None

    @property
    def schedule(self) -> SyncSchedule:
        """When what is exchanged.

        Raises:
            ConfigError: Numbers that make no schedule.
        """
        usual = 0.5 if self.overlap_steps else 0.0
        return SyncSchedule(
            sync_every=self.sync_every,
            warmup_steps=self.warmup_steps,
            fragments=self.fragments,
            overlap_steps=self.overlap_steps,
            mixing=usual if self.mixing is None else self.mixing,
        )


@dataclass(frozen=True, kw_only=True)
class AsyncSGDConfig(OptionGroup):
    """Asynchronous SGD; see `AsyncSGDOptions`.

    Raises:
        ConfigError: A bound, a rule or a warm-up that cannot be.
    """

    staleness_bound: int = 4
    staleness_lr: StalenessRule | None = "inverse"
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.staleness_bound < 0:
            raise ConfigError(
                f"staleness_bound must be a number of steps, 0 or more, got "
                f"{self.staleness_bound!r}; 4 is usual, 0 trains synchronously."
            )
        if self.warmup_steps < 0:
            raise ConfigError(
                f"warmup_steps must be a number of synchronous steps, 0 or more, got "
                f"{self.warmup_steps!r}."
            )
        if self.staleness_lr not in ("inverse", None):
            raise ConfigError(f"staleness_lr must be 'inverse' or None, got {self.staleness_lr!r}.")


@dataclass(frozen=True, kw_only=True)
class ElasticConfig(OptionGroup):
    """Elastic training; see `ElasticOptions`.

    Raises:
        ConfigError: Options that cannot be, or contradict each other.
    """

    scheme: ElasticScheme = "zero2"
    min_ranks: int = 1
    max_ranks: int | None = None
    snapshot_every: int = 10
    global_batch_size: int | None = None
    learning_rate_scaling: Literal["linear", "sqrt"] | None = None
    max_failures: int = 3
    patience: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.scheme not in _STAGES:
            raise ConfigError(
                f"scheme must be one of {', '.join(map(repr, _STAGES))}, got {self.scheme!r}: the "
                f"ranks of other schemes have parts of layers, without which the rest cannot go on."
            )
        if self.snapshot_every < 1:
            raise ConfigError(f"snapshot_every must be at least 1 step, got {self.snapshot_every}.")
        if self.max_failures < 0 or self.patience < 0:
            raise ConfigError(
                f"max_failures and patience (seconds) must be at least 0, got {self.max_failures} "
                f"and {self.patience}."
            )
        if self.min_ranks < 1 or (self.max_ranks is not None and self.max_ranks < self.min_ranks):
            raise ConfigError(
                f"Expected 1 <= min_ranks <= max_ranks, got min_ranks={self.min_ranks} and "
                f"max_ranks={self.max_ranks}."
            )
        self._check_batches()

    def _check_batches(self) -> None:
        batch, scaling = self.global_batch_size, self.learning_rate_scaling
        if batch is not None and batch < 1:
            raise ConfigError(f"global_batch_size must be at least 1, got {batch}.")
        if scaling not in (None, "linear", "sqrt"):
            raise ConfigError(
                f"learning_rate_scaling must be 'linear', 'sqrt' or None, got {scaling!r}."
            )
        if scaling is not None and batch is not None:
            raise ConfigError(
                f"learning_rate_scaling={scaling!r} lets the global batch change with the ranks, "
                f"but global_batch_size={batch} holds it. Leave one of them out."
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


def _check_stage(stage: int) -> None:
    if stage not in STAGES:
        raise ConfigError(f"zero_stage must be one of {STAGES}, got {stage!r}.")
