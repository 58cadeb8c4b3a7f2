"""Context parallelism as a Lightning strategy: sequences in parts, the rest data parallel."""

from typing import Unpack

from lightning_shard.parallel_dimensions.context import ContextDimension
from lightning_shard.strategies.configs import (
    ContextParallelConfig,
    FitEndConfig,
    GradientConfig,
    RunConfig,
)
from lightning_shard.strategies.flat_options import part, takes
from lightning_shard.strategies.model_parallel import ModelParallelStrategy
from lightning_shard.strategies.options import ContextParallelOptions, SplitOptions


class ContextParallelStrategy(ModelParallelStrategy):
    """A part of every sequence on each rank; `strategy="context_parallel"`.

    Raises:
        ConfigError: A size or stage that cannot be.
    """

    @takes(RunConfig, ContextParallelConfig, GradientConfig, FitEndConfig)
    def __init__(self, **options: Unpack[ContextParallelOptions]) -> None:
        sequences = ContextParallelConfig.of(options)
        dimension = ContextDimension(sequences.context_parallel_size)
        super().__init__(
            [dimension], zero_stage=sequences.zero_stage, **part(SplitOptions, options)
        )
