"""Context parallel as a dimension: sequences in parts over the ranks of an axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.random_state import share_random_state
from lightning_shard.context_parallel.crossings import total
from lightning_shard.context_parallel.cut_blocks import CutBlocks
from lightning_shard.core.mesh import ParallelMesh
from lightning_shard.core.options import AtLeastOne, AxisSize
from lightning_shard.core.states import MakesContext
from lightning_shard.data_parallel.differentiation import Gradients, Run, asking
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.data_parallel.options import ZeroStage
from lightning_shard.expert_parallel.batched import OwnTokens
from lightning_shard.planning.description import Description, Simulated
from lightning_shard.strategies.dimensions.dimension import (
    DimensionOptions,
    ParallelDimension,
    RunView,
)
from lightning_shard.strategies.trainer.same_on_ranks import SameResults
from lightning_shard.tensor_parallel.dim_sharded_tensor import DifferentiatedParts


class ContextDimension(ParallelDimension):
    """Each rank has a part of every sequence between the blocks, and all parameters."""

    axis = "cp"
    averages_gradients = True

    def __init__(self, size: int | None = None) -> None:
        super().__init__(size)
        self._blocks: CutBlocks | None = None
        self._experts: OwnTokens | None = None

    @override
    def split(self, run: RunView) -> ModelSplit | None:
        group = run.groups[self.axis]
        self.waits_in_backward = group.size > 1
        if group.size == 1:
            return None
        share_random_state(group, run.device)
        self._run = run
        self._same_results = SameResults(group, run.mesh.peers(self.axis, run.rank), run.device)
        return None

    @override
    def attach(self, engine: DataParallelEngine) -> None:
        if self._same_results is not None:
            run = self._run
            self._blocks, self._experts = _cut(run.model, run.mesh, run.groups[self.axis])

    @override
    def step_context(self) -> MakesContext | None:
        if self._same_results is None:
            return None
        return partial(asking, MeanGradients(self._run.groups[self.axis]))

    @override
    def before_backward(self, loss: Tensor) -> None:
        if self._blocks is not None:
            self._blocks.check_cut(self._run.model)
        super().before_backward(loss)

    @override
    def before_update(self, optimizer: Optimizer, number: int) -> None:
        if self._blocks is not None:
            self._blocks.compiled.share_out()

    @override
    def restore(self, *, full: bool) -> None:
        if self._blocks is not None:
            self._blocks.restore()
        if self._experts is not None:
            self._experts.restore()
        self._blocks = self._same_results = self._experts = None

    @override
    def simulated(self, model: nn.Module, found: Description, group: Collectives) -> Simulated:
        _cut(model, found.mesh, group, tries=False)
        return Simulated()


@dataclass(frozen=True, kw_only=True)
class ContextOptions(DimensionOptions):
    """What context parallelism takes.

    Attributes:
        context_parallel_size: Ranks that share each sequence; by default all. What they leave of
            the world is data parallel.
        zero_stage: ZeRO stage, 0 to 3: how the ranks keep their state; those that share a sequence
            as well.
    """

    context_parallel_size: AtLeastOne | None = None
    zero_stage: ZeroStage = 0

    @override
    def dimension(self) -> ParallelDimension:
        return ContextDimension(self.context_parallel_size)


@dataclass(frozen=True, kw_only=True)
class ContextAxis(DimensionOptions):
    """What context parallelism takes beside other dimensions.

    Attributes:
        context_parallel_size: Ranks that share each sequence, the mesh's axis "cp". They share out
            a copy of the state, too, where data_parallel_size makes several.
    """

    context_parallel_size: AxisSize = 1

    @override
    def dimension(self) -> ParallelDimension:
        return ContextDimension(self.context_parallel_size)


def _cut(
    model: nn.Module, mesh: ParallelMesh, group: Collectives, *, tries: bool = True
) -> tuple[CutBlocks, OwnTokens | None]:
    """Let the blocks of a model compute parts of sequences, and experts their tokens."""
    blocks = CutBlocks(model, group, joins_each=mesh.pp > 1, tries=tries)
    return blocks, OwnTokens(model) if mesh.ep == 1 else None  # else they are given their tokens


class MeanGradients(DifferentiatedParts):
    """Averages the gradients of full tensors over the ranks that share each sequence."""

    def __init__(self, group: Collectives) -> None:
        self._group = group

    def differentiate(self, inputs: Sequence[Any], run: Run, *, accumulates: bool) -> Gradients:
        """Return the gradients of inputs; see `Differentiator`."""
        found = super().differentiate(inputs, run, accumulates=accumulates)
        if accumulates:  # the engine averages them
            return found
        are_full = [isinstance(one, Tensor) for one in inputs]  # an edge stands for a part
        return tuple(
            total(grad / self._group.size, self._group) if is_full and grad is not None else grad
            for is_full, grad in zip(are_full, found, strict=True)
        )
