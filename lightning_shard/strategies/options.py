"""The options of the strategies: each is declared and explained here, once.

    class TensorParallelOptions(RunOptions, PlanOptions, GradientOptions, total=False): ...

    def __init__(self, **options: Unpack[TensorParallelOptions]) -> None: ...

A scheme takes the groups that make sense for it, and its own. Type checkers and editors read the
names and types of a constructor here; defaults, and what values cannot be, are in `configs`.
"""

from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from typing_extensions import TypedDict

from lightning_shard.core.mesh import Axis
from lightning_shard.data_parallel.async_sgd.async_sgd import StalenessRule
from lightning_shard.data_parallel.bucket_sizes import BucketMB
from lightning_shard.data_parallel.compression import Compressor
from lightning_shard.data_parallel.local_sgd.outer import OuterOptimizer
from lightning_shard.data_parallel.options import Offload
from lightning_shard.data_parallel.recompute.checkpointed_blocks import ActivationCheckpointing
from lightning_shard.pipeline_parallel.batch_reading import BatchLists

ReduceDType = Literal["float32", "bfloat16", "float16"]
CheckpointFormat = Literal["full", "sharded"]
AfterFit = bool | Literal["auto"]
ElasticScheme = Literal["shard_ddp", "zero1", "zero2", "zero3"]


class LightningOptions(TypedDict, total=False):
    """What Lightning's own parallel strategies take.

    Attributes:
        accelerator: Lightning's; the Trainer sets it.
        parallel_devices: One device per local rank; the Trainer sets them.
        cluster_environment: Lightning's; the Trainer finds it when it is left out.
        checkpoint_io: Lightning's; it writes and reads the files.
        precision_plugin: Lightning's; it is exchanged for a twin that works on shards.
    """

    accelerator: pl.accelerators.Accelerator | None
    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    checkpoint_io: CheckpointIO | None
    precision_plugin: Precision | None


class RanksOptions(TypedDict, total=False):
    """What every strategy takes, for a Trainer and for Fabric.

    Attributes:
        backend: A backend's name, or "auto": NCCL on GPUs; shared memory between CPU ranks of one
            host, Gloo over several.
        num_ranks: Ranks to run inside this process, with backend "in_process" only; by default the
            number of devices.
        timeout: Seconds (or a timedelta) after which a silent peer is an error.
        debug: Let ranks compare every collective call before they make it, so that a mistake is an
            error that names both call sites. Slow. On as well when LIGHTNING_SHARD_DEBUG is 1, and
            always within one process.
        checkpoint_format: "full", one file as a single device writes it, which rank 0 gathers; or
            "sharded", a folder to which each rank writes what it has. Either loads, whatever is
            set here.
    """

    backend: str
    num_ranks: int | None
    timeout: float | timedelta
    debug: bool
    checkpoint_format: CheckpointFormat


class RunOptions(LightningOptions, RanksOptions, total=False):
    """What every strategy of a Trainer takes.

    Attributes:
        announce: Say in one line, when a fit starts, what runs and what each rank will hold.
        save_trainable_only: Save no parameters that are frozen (`requires_grad=False`) then, such
            as the base of an adapter; buffers are saved. A run that loads such a checkpoint keeps
            its own values of them.
        save_on_sigterm: Save a fit that SIGTERM ends as `last-sigterm.ckpt` beside the files of the
            trainer's `ModelCheckpoint`, unless a callback saves on the exception.
        async_save: Let training go on while checkpoints of a fit are written: each rank copies
            what it has to host memory, which a thread writes. For the sharded format.
    """

    announce: bool
    save_trainable_only: bool
    save_on_sigterm: bool
    async_save: bool


class UnitOptions(TypedDict, total=False):
    """What the ranks communicate as one, and compute again in backward.

    Attributes:
        units: Class names of the modules that are communicated as one; found when left out.
        bucket_mb: Neighbouring small blocks are joined up to this many MB; by default 25, under
            stage 3 12.5. "auto" lets the ranks measure their links when a fit begins, and chooses
            1 to 64 MB, the same on all of them; the default within one process.
        activation_checkpointing: What is dropped in forward and computed again in backward:
            "full", all activations of the model's blocks; "selective", the same but for results of
            matrix products, convolutions and attention; or all of modules of these class names.
        activation_offload: Whether what forward keeps for backward lies in host memory until then,
            copied beside what computes.
    """

    units: list[str] | None
    bucket_mb: BucketMB
    activation_checkpointing: ActivationCheckpointing | None
    activation_offload: bool


class GradientOptions(UnitOptions, total=False):
    """How the gradients of data-parallel ranks travel.

    Attributes:
        reduce_dtype: Format in which gradients travel between data-parallel ranks; that of
            backward when left out.
    """

    reduce_dtype: ReduceDType | None


class SharedOptions(RunOptions, GradientOptions, total=False):
    """What all strategies share whose ranks average gradients."""


class FitEndOptions(TypedDict, total=False):
    """What a fit leaves on its ranks.

    Attributes:
        full_parameters_after_fit: Whether each rank has the full parameters after a fit whose
            ranks had shards. False leaves the shards, for `trainer.save_checkpoint` and further
            runs (up to stage 2, where parameters are full anyway, those of the optimizers' states);
            "auto" does so where the full state would not fit into the memory that is free then.
            Ranks of one process end with the fit: True there.
    """

    full_parameters_after_fit: AfterFit


class SplitOptions(SharedOptions, FitEndOptions, total=False):
    """What all strategies share whose ranks keep shards between the steps of a fit."""


class ShardOptions(TypedDict, total=False):
    """How shards and gradients travel, and where they lie.

    Attributes:
        compression: "fp16", "bf16", "int8", "topk", "powersgd", "onebit", a `Compressor`, or a
            mapping with `class_path` and `init_args`: what makes gradients smaller before they
            travel. "none" or None sends them as they are. Stages 0 to 2.
        offload: What lies in host memory: "optimizer", the shards that the optimizer updates, their
            gradients and its state, whose step the CPU then makes (stages 1 to 3); "parameters",
            the parameters' shards as well, which the device has only while a block needs them
            (stage 3).
        prefetch: Units that stage 3 gathers ahead of the one that runs; by default 1. With 0
            memory is least, and nothing computes while parameters travel.
    """

    compression: str | Compressor | dict[str, Any] | None
    offload: Offload | None
    prefetch: int | None


class DataParallelOptions(SplitOptions, ShardOptions, total=False):
    """What replicated data parallel and ZeRO take."""


class PlanOptions(TypedDict, total=False):
    """How layers are split.

    Attributes:
        plan: Maps patterns of module paths to styles: see `tensor_parallel.styles`. Or "auto",
            also as None: found by `tensor_parallel.automatic`.
    """

    plan: dict[str, Any] | str | None


class ScheduleOptions(TypedDict, total=False):
    """How a pipeline is cut into stages, and what runs when.

    Attributes:
        schedule: One of `pipeline_parallel.schedules.SCHEDULES`.
        num_microbatches: Parts of each batch; by default twice the ranks of the pipeline. A batch
            of fewer samples has one part for each.
        blocks: Path of the list of repeated blocks; found where there is one.
        split: What the stages have alike: "parameters", "flops" or "memory" (measured in the
            first batch); or the first block of each stage but the first.
        batch_lists: What lists and tuples in a batch are that can be read in two ways: "samples",
            one value for each, or "fields", each of all samples. "auto" goes by the loader, refuses
            what it cannot tell, and leaves batches of samples of different shapes whole.
    """

    schedule: str
    num_microbatches: int | None
    blocks: str | None
    split: str | list[int]
    batch_lists: BatchLists


class TensorParallelOptions(SplitOptions, PlanOptions, total=False):
    """What tensor parallelism takes.

    Attributes:
        tensor_parallel_size: Ranks that share each layer; by default all. What they leave of the
            world is data parallel.
        zero_stage: How the data-parallel ranks keep their state, 0 to 3.
        sequence_parallel: Whether the activations between the split layers' regions (norms,
            dropout, residual sums) are in slices of the sequence.
    """

    tensor_parallel_size: int | None
    zero_stage: int
    sequence_parallel: bool


class PipelineParallelOptions(SplitOptions, ScheduleOptions, total=False):
    """What pipeline parallelism takes.

    Attributes:
        pipeline_parallel_size: Ranks of one pipeline; by default all. What they leave of the world
            is data parallel.
    """

    pipeline_parallel_size: int | None


class ContextParallelOptions(SplitOptions, total=False):
    """What context parallelism takes.

    Attributes:
        context_parallel_size: Ranks that share each sequence; by default all. What they leave of
            the world is data parallel.
        zero_stage: How the ranks keep their state, 0 to 3; those that share a sequence as well.
    """

    context_parallel_size: int | None
    zero_stage: int


class HybridParallelOptions(SplitOptions, PlanOptions, ScheduleOptions, total=False):
    """What data, tensor and pipeline parallelism together take.

    Attributes:
        pipeline_parallel_size: Ranks of one pipeline.
        tensor_parallel_size: Ranks that share each layer of a stage.
        context_parallel_size: Ranks that share each sequence.
        expert_parallel_size: Ranks that share the experts of every mixture, and train on different
            batches.
        data_parallel_size: Models that train on different batches; -1 takes the remaining ranks. A
            pair (replicate, shard) is so many copies of the state, each in shards on so many
            neighbouring ranks; choose those of a node, and gathers stay inside it. With a
            context_parallel_size the ranks that share a sequence share out its copy, too.
        zero_stage: How the data-parallel ranks keep their state, 0 to 3. Stage 3 gathers each layer
            for every microbatch's forward and backward, each half of it where those are apart.
        axis_order: The axes "pp", "dp" and "tp" from the slowest to the fastest; where they
            are not named, "ep" comes after "dp" and "cp" before "tp".
    """

    pipeline_parallel_size: int
    tensor_parallel_size: int
    context_parallel_size: int
    expert_parallel_size: int
    data_parallel_size: int | tuple[int, int]
    zero_stage: int
    axis_order: tuple[Axis, ...]


class AutoOptions(RunOptions, FitEndOptions, total=False):
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

    machine: str
    device_memory: int | None
    tensor_plan: dict[str, Any] | None
    choice_file: str | None


class LocalSGDOptions(SharedOptions, total=False):
    """What local SGD and DiLoCo take; units, buckets and `reduce_dtype` are those of the warm-up.

    Attributes:
        sync_every: Steps between two exchanges of the same parameters.
        warmup_steps: Steps at the beginning that average gradients, as "shard_ddp" does: post-local
            SGD. Of a batch with several steps by hand, all belong to it if one does.
        outer_optimizer: None averages parameters. "nesterov", {"class_path": ..., "init_args":
            ...} or a function of a list of tensors is DiLoCo's outer optimizer, whose gradient is
            the mean of what the ranks have changed.
        fragments: Parts of the model that are exchanged in turns.
        overlap_steps: Steps that training goes on while a fragment travels.
        mixing: The share of its own parameters that a rank keeps when a fragment lands; by default
            0, with `overlap_steps` 0.5.
        compression: Compression of the changes that ranks send when they meet: "fp16", "bf16",
            "int8", "topk", "powersgd", a compressor, or {"class_path": ..., "init_args": ...}.
    """

    sync_every: int
    warmup_steps: int
    outer_optimizer: OuterOptimizer
    fragments: int
    overlap_steps: int
    mixing: float | None
    compression: str | Compressor | dict[str, Any] | None


class AsyncSGDOptions(RunOptions, UnitOptions, total=False):
    """What asynchronous SGD takes; `bucket_mb` is of synchronous steps.

    Attributes:
        staleness_bound: Steps that a rank may be ahead of the oldest part of the parameters that it
            uses. 0 is synchronous training.
        staleness_lr: Each gradient counts for 1 / N of the learning rate. "inverse": one that comes
            k > 1 rounds of N gradients after its parameters counts for 1 / (k N). None: all alike.
        warmup_steps: Synchronous steps at the beginning. The first ones suffer most from old
            gradients, since parameters move fastest and Adam's averages begin.
    """

    staleness_bound: int
    staleness_lr: StalenessRule | None
    warmup_steps: int


class ElasticOptions(SharedOptions, total=False):
    """What elastic training takes; a peer that is silent for `timeout` seconds is taken for lost.

    Attributes:
        scheme: "shard_ddp", "zero1", "zero2" or "zero3".
        min_ranks: With fewer, training waits for `patience` seconds, then saves and ends.
        max_ranks: Further newcomers wait until there is room; None admits all.
        snapshot_every: Optimizer steps between the boundaries that ranks remember: at most so many
            are done again after a loss. "shard_ddp" loses none but between an update and the end of
            its step.
        global_batch_size: Samples of an optimizer step, whatever the number of ranks; None keeps
            what the first ranks have together.
        learning_rate_scaling: "linear" or "sqrt": let the batch of each rank stay as it is, and
            scale the learning rate by the number of ranks; None holds the global batch instead.
        max_failures: A rank that raises errors of its own more often is evicted with the last.
        patience: Seconds to wait below `min_ranks`.
    """

    scheme: ElasticScheme
    min_ranks: int
    max_ranks: int | None
    snapshot_every: int
    global_batch_size: int | None
    learning_rate_scaling: Literal["linear", "sqrt"] | None
    max_failures: int
    patience: float
