"""Tensor, context and pipeline parallel as Lightning strategies, by themselves and on one mesh.

A strategy of these is its dimensions. What remains of the world is data parallel.
"""

from collections.abc import Mapping

from lightning_shard.core.options import takes
from lightning_shard.data_parallel.options import WireOptions
from lightning_shard.expert_parallel.load import ExpertLoad
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.dimensions.experts import ExpertDimension
from lightning_shard.strategies.options import (
    ContextParallelOptions,
    HybridParallelOptions,
    PipelineParallelOptions,
    SplitOptions,
    TensorParallelOptions,
)


class ContextParallelStrategy(DataParallelStrategy):
    """A part of every sequence on each rank; `strategy="context_parallel"`.

    Raises:
        ConfigError: A size or stage that cannot be.
    """

    @takes(ContextParallelOptions)
    def __init__(self, options: ContextParallelOptions) -> None:
        self.stage, self.dimensions = options.zero_stage, options.dimensions()
        super().__init__(**options.part(SplitOptions))


class TensorParallelStrategy(DataParallelStrategy):
    """Wide layers in parts over the ranks of a group; `strategy="tensor_parallel"`.

    Raises:
        ConfigError: A size, stage or plan that cannot be.
    """

    @takes(TensorParallelOptions)
    def __init__(self, options: TensorParallelOptions) -> None:
        self.stage, self.dimensions = options.zero_stage, options.dimensions()
        super().__init__(**options.part(SplitOptions))


class PipelineParallelStrategy(DataParallelStrategy):
    """Consecutive layers on each rank, microbatches in flight; `strategy="pipeline_parallel"`.

    Raises:
        ConfigError: A size, schedule or split that cannot be.
    """

    stage = 0

    @takes(PipelineParallelOptions)
    def __init__(self, options: PipelineParallelOptions) -> None:
        self.dimensions = options.dimensions()
        super().__init__(**options.part(SplitOptions))


class HybridParallelStrategy(DataParallelStrategy):
    """Stages of split layers, and copies of them on other data; `strategy="hybrid_parallel"`.

    Raises:
        ConfigError: Sizes that do not fit the ranks, or what either of the two refuses.
    """

    @takes(HybridParallelOptions)
    def __init__(self, options: HybridParallelOptions) -> None:
        self.stage, self.dimensions = options.zero_stage, options.dimensions()
        self.data_parallel_size, self.axis_order = options.data_parallel_size, options.axis_order
        super().__init__(**options.part(SplitOptions), **options.part(WireOptions))

    def expert_load(self) -> Mapping[str, ExpertLoad]:
        """Return by name how the tokens of each mixture were shared out in this fit, or the last.

        Each rank must call while the fit runs.
        """
        (experts,) = [one for one in self.dimensions if isinstance(one, ExpertDimension)]
        return experts.load()
