"""Pipeline parallelism as a Lightning strategy: stages of layers, batches in microbatches."""

from typing import Unpack

from lightning_shard.pipeline_parallel.pipeline import Pipeline
from lightning_shard.pipeline_parallel.schedules import Schedule
from lightning_shard.strategies.configs import (
    FitEndConfig,
    GradientConfig,
    PipelineParallelConfig,
    RunConfig,
)
from lightning_shard.strategies.flat_options import part, takes
from lightning_shard.strategies.model_parallel import ModelParallelStrategy
from lightning_shard.strategies.options import PipelineParallelOptions, SplitOptions


class PipelineParallelStrategy(ModelParallelStrategy):
    """Consecutive layers on each rank, microbatches in flight; `strategy="pipeline_parallel"`.

    Raises:
        ConfigError: A size, schedule or split that cannot be.
    """

    @takes(RunConfig, PipelineParallelConfig, GradientConfig, FitEndConfig)
    def __init__(self, **options: Unpack[PipelineParallelOptions]) -> None:
        stages = PipelineParallelConfig.of(options)
        self._stages = stages.dimension(
            stages.pipeline_parallel_size,
            recomputes=options.get("activation_checkpointing") is not None,
        )
        super().__init__([self._stages], **part(SplitOptions, options))

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline; there from `setup` to `teardown`."""
        return self._stages.pipeline

    @property
    def num_microbatches(self) -> int:
        """Parts of a batch that has as many samples."""
        return self._stages.options.num_parts(self.mesh.pp)

    @property
    def num_stages(self) -> int:
        """Stages over all ranks of the pipeline."""
        return self._stages.options.num_stages(self.mesh.pp)

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return what the ranks do with a batch of so many parts.

        Raises:
            ConfigError: The schedule does not allow it.
        """
        return self._stages.options.table(self.mesh.pp, num_microbatches)
