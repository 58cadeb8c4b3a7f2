"""The options that the engine has, and its settings: stage, units, number formats, compression."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import lcm
from typing import Annotated, Literal, TypeAlias

import torch
from torch import nn

from lightning_shard.core.options import AtLeastZero, ClassNames, Limit, Options
from lightning_shard.data_parallel.bucket_sizes import BucketMB, default_mb
from lightning_shard.data_parallel.compression import Compression, Compressor
from lightning_shard.data_parallel.compression.compressor import unscaled
from lightning_shard.data_parallel.compression.quantized_gather import GatherDType, QuantizedGathers
from lightning_shard.data_parallel.memory.flat_parameters import ValuesAtStart
from lightning_shard.data_parallel.memory.inner_tensors import is_inner
from lightning_shard.data_parallel.memory.quantised import is_quantised
from lightning_shard.data_parallel.optimizer_entries import StateBlocks
from lightning_shard.errors import ConfigError

STAGES = (0, 1, 2, 3)
ZeroStage: TypeAlias = Annotated[int, Limit("from 0 to 3", STAGES.__contains__)]
Offload = Literal["optimizer", "parameters"]
ActivationCheckpointing = Literal["full", "selective"] | ClassNames
AtLeastTwo: TypeAlias = Annotated[int, Limit("of at least 2", lambda number: number >= 2)]
Inside = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class DTypePolicy:
    """Number formats of parameters in compute, of traffic, and of the optimizer's copy.

    Attributes:
        compute: Format to which autocast rounds matrices in float32; None without autocast.
        reduce: Format in which gradients travel; None sends those of matrices in the format of
            compute, where that has the range of float32, and others as backward made them.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None

    def compute_dtype(self, param: torch.Tensor) -> torch.dtype:
        """Return the format in which autocast's regions use `param` (full shape)."""
        if self.compute is None or param.dtype != torch.float32 or param.ndim < 2:
            return param.dtype
        return self.compute


@dataclass(frozen=True, kw_only=True)
class UnitOptions(Options):
    """What the ranks communicate as one, and compute again in backward.

    Attributes:
        units: Class names of the modules that are communicated as one; found when left out.
        bucket_mb: MB up to which neighbouring small blocks are joined; by default 25, under stage 3
            12.5. "auto" lets the ranks measure their links when a fit begins, and chooses
            1 to 64 MB, the same on all of them; the default within one process.
        activation_checkpointing: What is dropped in forward and computed again in backward:
            "full", all activations of the model's blocks; "selective", the same but for results of
            matrix products, convolutions and attention; or all of modules of these class names.
        activation_offload: Whether what forward keeps for backward lies in host memory until then,
            copied beside what computes.
    """

    units: ClassNames | None = None
    bucket_mb: BucketMB = None
    activation_checkpointing: ActivationCheckpointing | None = None
    activation_offload: bool = False


@dataclass(frozen=True, kw_only=True)
class WireOptions(Options):
    """In how few bits parameters and gradients travel.

    Attributes:
        compression: "fp16", "bf16", "int8", "int4", "topk", "powersgd", "onebit", a `Compressor`,
            or a mapping with `class_path` and `init_args`: what makes gradients smaller before they
            travel. "none" or None sends them as they are. Stage 3 takes what keeps nothing between
            steps: the first four.
        quantized_gathers: "int8": parameters are gathered in 8 bits with a scale for each 128
            values, after an update (stages 1 and 2) or at each unshard (stage 3); the shards that
            the optimizer updates, and checkpoints, stay exact. None gathers them as they are.
        gather_dtype: "float8": stage 3 gathers weights of layers in float8 (torchao's) as these
            round them, by scales of the full weights, which one reduction finds for all of a step.
            None gathers them like all others.
    """

    compression: Compression = None
    quantized_gathers: QuantizedGathers | None = None
    gather_dtype: GatherDType | None = None


@dataclass(frozen=True, kw_only=True)
class ShardOptions(WireOptions):
    """How shards and gradients travel, and where they lie.

    Attributes:
        offload: What lies in host memory: "optimizer", the shards that the optimizer updates, their
            gradients and its state, whose step the CPU then makes (stages 1 to 3); "parameters",
            the parameters' shards as well, which the device has only while a block needs them
            (stage 3).
        prefetch: Units that stage 3 gathers ahead of the one that runs; by default 1. With 0
            memory is least, and nothing computes while parameters travel.
        reshard_after_forward: Ranks over which stage 3 shards parameters from forward to backward,
            so many neighbours, such as those of a node: each keeps its part of what forward has
            gathered, and backward gathers from these. None gathers from all ranks again.
    """

    offload: Offload | None = None
    prefetch: AtLeastZero | None = None
    reshard_after_forward: AtLeastTwo | None = None


@dataclass(frozen=True, kw_only=True)
class SumOptions(Options):
    """In which order gradients are added up.

    Attributes:
        same_bits: Whether a training has the same bits on any number of ranks: the global batch is
            so many micro-batches of one size, whose gradients are added in the order of their
            numbers, and samples, random numbers and means follow the micro-batch.
    """

    same_bits: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineOptions(SumOptions, ShardOptions, UnitOptions):
    """Settings of the data-parallel engine.

    Attributes:
        stage: 0 replicates everything; 1 shards optimizer state; 2 also gradients; 3 also
            parameters (ZeRO, arXiv:1910.02054).
        owned: Parameters that lie full on one rank each, from stage 1 on, for optimizers of full
            matrices; see `OwnedLayout`.
        blocks: By parameter whose optimizer keeps state in blocks, those; shards are multiples.
        start: Knows the values of parameters that are on meta; None where there are none.
        loss_scale: As for `FlatBuffer`.
        seeing_shards: Makes the context in which the engine works: each step and backward, and what
            takes over values, which a hook that sees full weights may have begun.
        around_backward: Make the contexts in which each backward, with its recomputed forwards,
            runs; the first is the outermost.
        waits_in_backward: Whether ranks wait for each other in a backward, besides for gradients.
        expects_edits: Whether user code may edit gradients, so that ranks compare at every update.
        may_reformat: Whether parameters may be laid out anew in other formats before the first
            step.
        takes_newcomers: Whether who has made the engine makes another one where user code gives the
            model other parameters in the middle of a run.
    """

    stage: ZeroStage
    dtypes: DTypePolicy = field(default_factory=DTypePolicy)
    compression: Compressor | None = None
    owned: Collection[nn.Parameter] = frozenset()
    blocks: Mapping[nn.Parameter, StateBlocks] = field(default_factory=dict)
    start: ValuesAtStart | None = None
    loss_scale: Callable[[], torch.Tensor | None] = field(default=unscaled, compare=False)
    seeing_shards: Inside = field(default=nullcontext, compare=False)
    around_backward: Sequence[Inside] = field(default=(), compare=False)
    waits_in_backward: bool = False
    expects_edits: bool = False
    may_reformat: bool = False
    takes_newcomers: bool = False

    def full_dtype(self, param: torch.Tensor, *, in_block: bool) -> torch.dtype:
        """Return the format of a full parameter: of blocks, stage 3 gathers what is rounded."""
        is_rounded = self.stage == 3 and in_block and not is_inner(param)
        return self.dtypes.compute_dtype(param) if is_rounded else param.dtype

    def gathers_in(self, param: torch.Tensor) -> QuantizedGathers | None:
        """Return in how few bits `param` is gathered; None for those of its format."""
        is_packed = is_quantised(param) or is_inner(param)
        return self.quantized_gathers if param.is_floating_point() and not is_packed else None

    def reduce_dtype(self, param: torch.Tensor, *, in_block: bool) -> torch.dtype:
        """Return the format in which the gradient of `param` (full shape) travels.

        A scaled loss has gradients outside autocast that are too large for float16.
        """
        own, rounded = self.full_dtype(param, in_block=in_block), self.dtypes.compute_dtype(param)
        return self.dtypes.reduce or (own if rounded == torch.float16 else rounded)

    @property
    def block_size(self) -> int:
        """The number of elements of which a parameter's part of a shard is a multiple."""
        return lcm(*(blocks.size for blocks in self.blocks.values()))

    @property
    def unit_mb(self) -> float:
        """The size up to which blocks are joined, in MB."""
        if self.bucket_mb is None or isinstance(self.bucket_mb, str):
            return default_mb(self.stage)
        return self.bucket_mb

    def __post_init__(self) -> None:
        """Refuse settings that cannot work, before any process starts."""
        super().__post_init__()
        if self.compression is not None:
            self._check_compression()
        if self.offload is not None:
            self._check_offload()
        if self.same_bits:
            self._check_same_bits()
        for name in ("quantized_gathers", "gather_dtype"):
            if getattr(self, name) is not None:
                self._check_gathers(name)
        if self.prefetch is not None and self.stage < 3:
            raise ConfigError(
                f"prefetch={self.prefetch} says how many units are unsharded ahead, got ZeRO stage "
                f"{self.stage}, whose parameters are never sharded. Leave it out, or use "
                f"strategy='zero3'."
            )

        if self.reshard_after_forward is not None:
            self._check_reshard_after_forward()

    def _check_reshard_after_forward(self) -> None:
        given = f"reshard_after_forward={self.reshard_after_forward}"
        if self.stage < 3:
            raise ConfigError(
                f"{given} is a number of ranks that share parameters between forward and backward, "
                f"got ZeRO stage {self.stage}, whose ranks have all of them. Leave it out, or use "
                f"strategy='zero3'."
            )
        if self.offload == "parameters":
            raise ConfigError(
                f"{given} keeps parameters on the device between forward and backward, got "
                f"offload='parameters', which keeps none there. Leave one of them out."
            )

    def offload_of(self, *, is_fitting: bool) -> Offload | None:
        """Return what a run has in host memory: without a fit there is no optimizer."""
        return None if self.offload == "optimizer" and not is_fitting else self.offload

    def _check_offload(self) -> None:
        if self.stage == 0:
            raise ConfigError(
                f"offload={self.offload!r} keeps this rank's shard of the optimizer's state in "
                f"host memory, got ZeRO stage 0, whose ranks have no shards. Use "
                f"strategy='zero2_offload', or ZeRO1Strategy(offload='optimizer')."
            )
        if self.offload == "parameters" and self.stage < 3:
            raise ConfigError(
                f"offload='parameters' keeps the parameters in host memory while no block needs "
                f"them, got ZeRO stage {self.stage}, whose devices always have full parameters. "
                f"Use offload='optimizer', or strategy='zero3_offload'."
            )
        if self.compression is not None:
            raise ConfigError(
                f"offload={self.offload!r} copies uncompressed gradients to the host, got the "
                f"compressor {type(self.compression).__name__}, whose memory of what it has not "
                f"sent stays on the device. Leave one of them out."
            )

    def _check_same_bits(self) -> None:
        if self.compression is not None:
            raise ConfigError(
                f"same_bits=True adds the gradients of micro-batches as they are, got the "
                f"compressor {type(self.compression).__name__}, which loses some of each rank's. "
                f"Leave one of them out."
            )
        if self.dtypes.reduce is not None:
            raise ConfigError(
                f"same_bits=True sends gradients as backward made them and adds them in float32, "
                f"got a reduce_dtype of {self.dtypes.reduce}. Leave one of them out."
            )

    def _check_gathers(self, name: str) -> None:
        given = f"{name}={getattr(self, name)!r}"
        if self.stage == 0:
            raise ConfigError(
                f"{given} gathers parameters in few bits, got ZeRO stage 0, whose ranks update "
                f"all of them and gather none. Use strategy='zero1' or a higher stage, or leave "
                f"it out."
            )
        if self.stage < 3 and name == "gather_dtype":
            raise ConfigError(
                f"{given} gathers weights for the layers that round them so, got ZeRO stage "
                f"{self.stage}, whose ranks have full weights at all times. Use strategy='zero3', "
                f"or quantized_gathers='int8'."
            )
        if self.offload == "parameters":
            raise ConfigError(
                f"{given} gathers shards that the device keeps, got offload='parameters', whose "
                f"shards lie in host memory. Use offload='optimizer', or leave one of them out."
            )
        if self.same_bits:
            raise ConfigError(
                f"same_bits=True gathers parameters as they are, got {given}, whose scales are of "
                f"blocks that end where shards do, or of weights that one rank alone does not "
                f"round. Leave one of them out."
            )

    def _check_compression(self) -> None:
        kind = type(self.compression).__name__
        if self.stage == 3 and self.compression is not None and self.compression.keeps:
            raise ConfigError(
                f"{kind} keeps on each rank what it has not sent of all gradients, as many values "
                f"as the model has parameters, got ZeRO stage 3, whose ranks have shards alone. "
                f"Use compression='int4' or 'int8', which keep nothing, or strategy='zero2'."
            )
        if self.dtypes.reduce is not None:
            raise ConfigError(
                f"The compressor {kind} says in which format gradients travel, got a reduce_dtype "
                f"of {self.dtypes.reduce}, too. Leave one of them out."
            )
