"""The settings of the engine: its stage, its units, its number formats and compression."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import nn

from lightning_shard.data_parallel.bucket_sizes import BucketMB, default_mb
from lightning_shard.data_parallel.compression.compressor import Compressor
from lightning_shard.data_parallel.memory.values_at_start import ValuesAtStart
from lightning_shard.data_parallel.recompute.checkpointed_blocks import ActivationCheckpointing
from lightning_shard.errors import ConfigError

STAGES = (0, 1, 2, 3)
Offload = Literal["optimizer", "parameters"]


@dataclass(frozen=True, kw_only=True)
class DTypePolicy:
    """Number formats of parameters in compute, of traffic, and of the optimizer's copy.

    Attributes:
        compute: Format to which autocast rounds matrices in float32; None without autocast.
            Vectors (norms, biases) keep their own format.
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
class EngineOptions:
    """Settings of the data-parallel engine.

    Attributes:
        stage: 0 replicates everything; 1 shards optimizer state; 2 also gradients; 3 also
            parameters (ZeRO, arXiv:1910.02054).
        units: Class names of the modules that are communicated as one; None finds repeated blocks.
        bucket_mb: Neighbouring small blocks are joined up to this many MB of parameters; None for
            the default of `bucket_sizes`; "auto" has it, too, until `bucket_choice` has measured.
        dtypes: Number formats of compute, traffic and the optimizer's copy.
        compression: How gradients are compressed before they travel; stages 0 to 2.
        owned: Parameters that lie full on one rank each, from stage 1 on, for optimizers of full
            matrices; see `layout/owned`.
        activation_checkpointing: Blocks whose activations are computed again in backward: see
            `checkpointed_blocks`.
        activation_offload: Whether what autograd saves lies in host memory until backward: see
            `offload.activations`.
        offload: What lies in host memory, see `offload`: "optimizer", the optimizer's shards, their
            gradients and its state, from stage 1 on; "parameters", under stage 3, the parameters'
            shards as well, which the device then has only while they are unsharded.
        prefetch: Units that stage 3 unshards ahead of the one that runs; None for 1.
        start: Knows the values of parameters that are on meta; None where there are none.
    """

    stage: int
    units: Sequence[str] | None = None
    bucket_mb: BucketMB = None
    dtypes: DTypePolicy = field(default_factory=DTypePolicy)
    compression: Compressor | None = None
    owned: Collection[nn.Parameter] = frozenset()
    activation_checkpointing: ActivationCheckpointing | None = None
    activation_offload: bool = False
    offload: Offload | None = None
    prefetch: int | None = None

    @property
    def units_ahead(self) -> int:
        """The number of units that are unsharded ahead."""
        return 1 if self.prefetch is None else self.prefetch

    start: ValuesAtStart | None = None

    def full_dtype(self, param: torch.Tensor, *, in_block: bool) -> torch.dtype:
        """Return the format of a full parameter, which autocast rounds by itself.

        Stage 3 brings together what has been rounded of the parameters of blocks.
        """
        is_rounded = self.stage == 3 and in_block
        return self.dtypes.compute_dtype(param) if is_rounded else param.dtype

    def reduce_dtype(self, param: torch.Tensor, *, in_block: bool) -> torch.dtype:
        """Return the format in which the gradient of `param` (full shape) travels.

        A scaled loss has gradients outside autocast that are too large for float16.
        """
        own, rounded = self.full_dtype(param, in_block=in_block), self.dtypes.compute_dtype(param)
        return self.dtypes.reduce or (own if rounded == torch.float16 else rounded)

    @property
    def unit_mb(self) -> float:
        """The size up to which blocks are joined, in MB."""
        if self.bucket_mb is None or isinstance(self.bucket_mb, str):
            return default_mb(self.stage)
        return self.bucket_mb

    def __post_init__(self) -> None:
        """Refuse settings that cannot work, before any process starts."""
        if self.stage not in STAGES:
            raise ConfigError(f"The ZeRO stage must be one of {STAGES}, got {self.stage!r}.")
        self._check_bucket()
        if self.compression is not None:
            self._check_compression()
        self._check_checkpointing()
        self._check_offload()
        self._check_prefetch()
        if isinstance(self.units, str) or (self.units is not None and not self.units):
            raise ConfigError(
                f"units must be a list of module class names such as ['Block'], got {self.units!r}."
            )

    def _check_bucket(self) -> None:
        is_word = isinstance(self.bucket_mb, str)
        if self.bucket_mb != "auto" if is_word else not self.unit_mb > 0:
            raise ConfigError(
                f"bucket_mb must be a positive number of MB or 'auto', which measures the link, "
                f"got {self.bucket_mb!r}; 25 is usual."
            )

    def _check_checkpointing(self) -> None:
        choice = self.activation_checkpointing
        is_known = choice in ("full", "selective") if isinstance(choice, str) else choice != []
        if not is_known:
            raise ConfigError(
                f"activation_checkpointing must be 'full', 'selective' or a list of module class "
                f"names such as ['Block'], got {choice!r}."
            )

    def offload_of(self, *, is_fitting: bool) -> Offload | None:
        """Return what a run has in host memory: without a fit there is no optimizer."""
        return None if self.offload == "optimizer" and not is_fitting else self.offload

    def _check_offload(self) -> None:
        if self.offload is None:
            return
        if self.offload not in get_args(Offload):
            raise ConfigError(
                f"offload must be 'optimizer', 'parameters' or None, got {self.offload!r}."
            )
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

    def _check_prefetch(self) -> None:
        if self.prefetch is None:
            return
        if self.stage < 3:
            raise ConfigError(
                f"prefetch={self.prefetch} says how many units are unsharded ahead, got ZeRO stage "
                f"{self.stage}, whose parameters are never sharded. Leave it out, or use "
                f"strategy='zero3'."
            )
        if self.prefetch < 0:
            raise ConfigError(
                f"prefetch must be at least 0 units, got {self.prefetch}; 1 is usual, and 0 takes "
                f"the least memory."
            )

    def _check_compression(self) -> None:
        kind = type(self.compression).__name__
        if self.stage == 3:
            raise ConfigError(
                f"Gradients are compressed under the stages 0 to 2, got {kind} under ZeRO stage 3, "
                f"which gathers parameters more often than it sends gradients. Use "
                f"strategy='zero2', or leave compression out."
            )
        if self.dtypes.reduce is not None:
            raise ConfigError(
                f"The compressor {kind} says in which format gradients travel, got a reduce_dtype "
                f"of {self.dtypes.reduce}, too. Leave one of them out."
            )
