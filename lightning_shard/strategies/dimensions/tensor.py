"""Tensor parallel as a dimension: wide layers in parts over the ranks of an axis."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeAlias

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.random_state import share_random_state
from lightning_shard.core.modules import refuse_scripted_parts
from lightning_shard.core.options import AtLeastOne, AxisSize, Limit
from lightning_shard.core.states import MakesContext
from lightning_shard.data_parallel.agreement import check_same_model
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.leftovers import refuse_leftover_shards
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.data_parallel.options import ZeroStage
from lightning_shard.errors import ConfigError
from lightning_shard.planning.description import Description, Measure, Simulated
from lightning_shard.strategies.dimensions.dimension import (
    DimensionOptions,
    ParallelDimension,
    RunView,
)
from lightning_shard.strategies.trainer.same_on_ranks import SameResults
from lightning_shard.tensor_parallel.automatic import automatic_plan, check_layouts
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor, full_tensor
from lightning_shard.tensor_parallel.plan import PlannedLayer, match_plan
from lightning_shard.tensor_parallel.probe import with_tried_wrappers
from lightning_shard.tensor_parallel.split import SplitModel

LayerPlan: TypeAlias = Annotated[dict[str, Any], Limit("of patterns and their styles", bool)]


class TensorDimension(ParallelDimension):
    """Each rank has a part of every wide layer, and computes what it has."""

    axis = "tp"

    def __init__(
        self,
        size: int | None = None,
        *,
        plan: dict[str, Any] | str | None = "auto",
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(size)
        self._plan, self._sequence_parallel = plan, sequence_parallel
        self._layers: SplitModel | None = None
        self._buffers: Sequence[dict[str, Tensor | None]] = ()
        self._found: Sequence[PlannedLayer] = ()  # those that are split in the present run
        self._engine: DataParallelEngine | None = None

    @override
    def check(self, run: RunView) -> None:
        if run.mesh.size(self.axis) > 1:
            refuse_scripted_parts(run.model, "tensor parallel")

    @override
    def split(self, run: RunView) -> ModelSplit | None:
        model, group = run.model, run.groups[self.axis]
        refuse_leftover_shards(model)
        check_same_model(model, group)
        if group.size == 1:  # nothing is split, so nothing has to be splittable
            return None
        self._found = layers = self._planned_layers(model, group.size)
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:  # those are made alike on every rank
                same = tensor.data.to(run.device).contiguous()
                group.broadcast(same).wait()
                tensor.data = same.to(tensor.device)
        share_random_state(group, run.device)
        self._layers = SplitModel(
            model,
            layers,
            group,
            sequence_parallel=self._sequence_parallel,
            make=None if run.start is None else run.start.make,
        )
        _forget_graphs(self._layers.shardings)
        self._buffers = [one._buffers for one in model.modules() if one._buffers]
        ranks = run.mesh.peers(self.axis, run.rank)
        self._same_results = SameResults(group, ranks, run.device)
        return self._layers

    def _planned_layers(self, model: nn.Module, num_ranks: int) -> list[PlannedLayer]:
        """Return what the plan splits, given or found."""
        if isinstance(self._plan, dict):
            layers = list(with_tried_wrappers(match_plan(model, self._plan), num_ranks))
            check_layouts(model, layers, num_ranks)
            return layers
        return automatic_plan(model, num_ranks)

    @override
    def attach(self, engine: DataParallelEngine) -> None:
        self._engine = engine
        if self._layers is not None and engine.split is self._layers:
            self._layers.copy_sharded()

    @override
    def step_context(self) -> MakesContext:
        return self._step_of_module

    @contextmanager
    def _step_of_module(self) -> Iterator[None]:
        """Make full what a step puts into buffers, which one rank alone may read afterwards."""
        with self._in_step():
            yield
            for buffers in self._buffers:
                for name, buffer in buffers.items():
                    if isinstance(buffer, DimShardedTensor):
                        buffers[name] = full_tensor(buffer)

    @override
    def backward_context(self) -> MakesContext:
        return self._in_step

    def _in_step(self) -> AbstractContextManager[None]:
        """Inside, weights of split layers look full to all code but the layers' own."""
        return nullcontext() if self._layers is None else self._layers.step()

    @override
    def around_hook(self) -> AbstractContextManager[None]:
        return nullcontext() if self._layers is None else self._layers.hook()

    @override
    def before_update(self, optimizer: Optimizer, number: int) -> None:
        same, split, engine = self._same_results, self._layers, self._engine
        if same is None or not same.is_due(f"optimizer {number}"):
            return
        assert split is not None
        assert engine is not None
        own = {param for group in optimizer.param_groups for param in group["params"]}
        full = {
            param: name
            for name, param in engine.model.named_parameters()
            if param in own and engine.split.is_here(param) and not split.groups_of(param)
        }
        with engine.optimizer_view():
            same.check_gradients(list(full.values()), list(full))

    @override
    def finish_copies(self) -> None:
        layers, engine = self._layers, self._engine
        if layers is not None and engine is not None and engine.split is not layers:
            layers.unsplit_copies()

    @override
    def forget_activations(self) -> None:
        if self._layers is not None:
            self._layers.forget_activations()

    @override
    def restore(self, *, full: bool) -> None:
        if self._layers is not None:
            params = list(self._layers.shardings)
            self._layers.restore(full=full)
            _forget_graphs(params)
        self._layers = self._same_results = self._engine = None
        self._buffers = ()
        self._found = ()

    @override
    def described(
        self, found: Description, module: "pl.LightningModule", measure: Measure
    ) -> Description:
        num_ranks = found.mesh.size(self.axis)
        return replace(
            found, layers=() if num_ranks == 1 else self._described_layers(module, num_ranks)
        )

    @override
    def simulated(self, model: nn.Module, found: Description, group: Collectives) -> Simulated:
        layers = [replace(one, module=model.get_submodule(one.name)) for one in found.layers]
        split = SplitModel(model, layers, group, sequence_parallel=self._sequence_parallel)
        return Simulated(split=split, forget=split.forget_activations)

    def _described_layers(self, module: nn.Module, num_ranks: int) -> Sequence[PlannedLayer]:
        """Return what a plan splits; a given one is believed, without trying it out."""
        if isinstance(self._plan, dict):
            return match_plan(module, self._plan)
        if self._found:  # in a run: the module is a copy of the one that is split
            return self._found
        if any(param.is_meta for param in module.parameters()):
            raise ConfigError(
                f"plan='auto' tries layers of {type(module).__name__} out, but its parameters are "
                f"on meta; expected ones with values, or a plan such as "
                f"plan={{'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}}. The plan that is "
                f"found for a small model of the same class says the patterns."
            )
        return self._planned_layers(module, num_ranks)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(DimensionOptions):
    """How layers are split.

    Attributes:
        plan: Maps patterns of module paths to styles of `tensor_parallel.styles`, such as
            {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}. Or "auto", also as None: found
            by trial.
    """

    plan: LayerPlan | Literal["auto"] | None = "auto"


@dataclass(frozen=True, kw_only=True)
class TensorOptions(PlanOptions):
    """What tensor parallelism takes.

    Attributes:
        tensor_parallel_size: Ranks that share each layer; by default all. What they leave of the
            world is data parallel.
        zero_stage: ZeRO stage, 0 to 3: how the data-parallel ranks keep their state.
        sequence_parallel: Whether the activations between the split layers' regions (norms,
            dropout, residual sums) are in slices of the sequence.
    """

    tensor_parallel_size: AtLeastOne | None = None
    zero_stage: ZeroStage = 0
    sequence_parallel: bool = False

    @override
    def dimension(self) -> ParallelDimension:
        size, in_slices = self.tensor_parallel_size, self.sequence_parallel
        return TensorDimension(size, plan=self.plan, sequence_parallel=in_slices)


@dataclass(frozen=True, kw_only=True)
class TensorAxis(PlanOptions):
    """What tensor parallelism takes beside other dimensions.

    Attributes:
        tensor_parallel_size: Ranks that share each layer of a stage.
    """

    tensor_parallel_size: AxisSize = 1

    @override
    def dimension(self) -> ParallelDimension:
        return TensorDimension(self.tensor_parallel_size, plan=self.plan)


def _forget_graphs(params: Iterable[nn.Parameter]) -> None:
    """Let parameters whose shape has changed be used in new graphs while old ones are alive."""
    # An old graph keeps the node that accumulates the gradient, and with it the old shape; autograd
    # makes another node only when the format changes.
    for param in params:
        value = param.data
        other = torch.float32 if value.dtype == torch.float64 else torch.float64
        param.data = value.new_empty(0, dtype=other)
        param.data = value
