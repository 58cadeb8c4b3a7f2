"""A dimension of one's own, all of it in one file: each rank computes its rows of every batch.

A scheme has it by one name in a list, `RowsAxis` among the bases of its options.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.options import AxisSize, takes
from lightning_shard.core.schemes import Scheme
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.data_parallel.options import ZeroStage
from lightning_shard.errors import ConfigError
from lightning_shard.planning.description import Description, Simulated
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.dimensions.dimension import (
    DimensionOptions,
    ModuleStep,
    ParallelDimension,
    RunView,
    StepKind,
    StepRunner,
)
from lightning_shard.strategies.dimensions.pipeline import PipelineAxis
from lightning_shard.strategies.dimensions.tensor import TensorAxis
from lightning_shard.strategies.options import SplitOptions


class RowsDimension(ParallelDimension):
    """Each rank computes its rows of the batch that all along the axis are given."""

    axis = "rows"
    averages_gradients = True

    def check(self, run: RunView) -> None:
        if run.mesh.size(self.axis) > 1 and any(type(one) is nn.RNN for one in run.model.modules()):
            raise ConfigError("rows_parallel_size: an RNN keeps its rows together; leave it out.")

    def split(self, run: RunView) -> ModelSplit | None:
        self._group = run.groups[self.axis]
        return None

    def runner(self, inner: StepRunner) -> StepRunner:
        return RowSteps(inner, self._group)

    @property
    def held_besides(self) -> Sequence[str]:
        return () if self.size == 1 else ("rows of other ranks",)

    def simulated(self, model: nn.Module, found: Description, group: Collectives) -> Simulated:
        module: Any = model
        step = module.training_step
        module.training_step = lambda batch, *args: step(own_rows(batch, group), *args)
        return Simulated()


class RowSteps(StepRunner):
    def __init__(self, inner: StepRunner, group: Collectives) -> None:
        self._inner, self._group = inner, group

    def run(
        self, kind: StepKind, step: ModuleStep, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return self._inner.run(kind, step, (own_rows(args[0], self._group), *args[1:]), kwargs)


def own_rows(batch: Any, group: Collectives) -> Any:
    """Return this rank's rows of a batch; the ranks greet each other along their axis."""
    group.all_reduce(torch.ones(())).wait()
    return tree_map(lambda one: one[group.rank :: group.size], batch)


@dataclass(frozen=True, kw_only=True)
class RowsAxis(DimensionOptions):
    """What the dimension takes.

    Attributes:
        rows_parallel_size: Ranks that share the rows of a batch.
    """

    rows_parallel_size: AxisSize = 1

    def dimension(self) -> ParallelDimension:
        return RowsDimension(self.rows_parallel_size)


@dataclass(frozen=True, kw_only=True)
class RowsParallelOptions(RowsAxis, TensorAxis, PipelineAxis, SplitOptions):
    """What a scheme takes that has the dimension beside two others.

    Attributes:
        zero_stage: How the ranks that average gradients keep their state.
    """

    zero_stage: ZeroStage = 0


class RowsParallelStrategy(DataParallelStrategy):
    """Rows of a batch, wide layers and stages on their ranks."""

    @takes(RowsParallelOptions)
    def __init__(self, options: RowsParallelOptions) -> None:
        self.stage, self.dimensions = options.zero_stage, options.dimensions()
        super().__init__(**options.part(SplitOptions))


ROWS_PARALLEL = Scheme(
    class_name="RowsParallelStrategy",
    text="Ranks share the rows of a batch.",
    under_fabric="a Trainer gives ranks of a model the same batches; under Fabric use 'zero2'",
)
