"""Tensor parallelism as a Lightning strategy: layers split over ranks, the rest data parallel."""

from typing import Unpack

from lightning_shard.strategies.configs import (
    FitEndConfig,
    GradientConfig,
    RunConfig,
    TensorParallelConfig,
)
from lightning_shard.strategies.flat_options import part, takes
from lightning_shard.strategies.model_parallel import ModelParallelStrategy
from lightning_shard.strategies.options import SplitOptions, TensorParallelOptions


class TensorParallelStrategy(ModelParallelStrategy):
    """Wide layers in parts over the ranks of a group; `strategy="tensor_parallel"`.

    Raises:
        ConfigError: A size, stage or plan that cannot be.
    """

    @takes(RunConfig, TensorParallelConfig, GradientConfig, FitEndConfig)
    def __init__(self, **options: Unpack[TensorParallelOptions]) -> None:
        layers = TensorParallelConfig.of(options)
        dimension = layers.dimension(
            layers.tensor_parallel_size, sequence_parallel=layers.sequence_parallel
        )
        super().__init__([dimension], zero_stage=layers.zero_stage, **part(SplitOptions, options))
