"""Tensor parallelism as a Lightning strategy: layers split over ranks, the rest data parallel."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.data_parallel.agreement import check_same_model
from lightning_shard.data_parallel.leftovers import refuse_leftover_shards
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.errors import ConfigError
from lightning_shard.mesh import Axis, ParallelMesh
from lightning_shard.planner.description import Description, Measure
from lightning_shard.strategies.configs import GradientConfig, RunConfig, TensorParallelConfig
from lightning_shard.strategies.flat_options import part, takes
from lightning_shard.strategies.model_parallel import ModelParallelStrategy
from lightning_shard.strategies.options import SharedOptions, TensorParallelOptions
from lightning_shard.tensor_parallel.automatic import automatic_plan
from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor
from lightning_shard.tensor_parallel.fused_layouts import check_layouts
from lightning_shard.tensor_parallel.plan import PlannedLayer, match_plan
from lightning_shard.tensor_parallel.randomness import share_random_state
from lightning_shard.tensor_parallel.split import SplitModel
from lightning_shard.tensor_parallel.tried_wrappers import with_tried_wrappers
from lightning_shard.trainer.same_results import SameResults


class TensorParallelStrategy(ModelParallelStrategy):
    """Wide layers in parts over the ranks of a group; `strategy="tensor_parallel"`.

    Raises:
        ConfigError: A size, stage or plan that cannot be.
    """

    model_axes: ClassVar[tuple[Axis, ...]] = ("tp",)

    @takes(RunConfig, TensorParallelConfig, GradientConfig)
    def __init__(self, **options: Unpack[TensorParallelOptions]) -> None:
        layers = TensorParallelConfig.of(options)
        self.stage = layers.zero_stage  # type: ignore[misc]
        super().__init__(**part(SharedOptions, options))
        self._tensor_parallel_size = layers.tensor_parallel_size
        self._plan = layers.plan
        self._sequence_parallel = layers.sequence_parallel
        self._layers_split: SplitModel | None = None
        self._same_results: SameResults | None = None

    @property
    @override
    def mesh(self) -> ParallelMesh:
        size = self._tensor_parallel_size
        return ParallelMesh.of_world(self.world_size, tp=self.world_size if size is None else size)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        super().setup(trainer)
        ranks = self.mesh.peers("tp", self.global_rank)
        self._same_results = SameResults(self.along("tp"), ranks, self.root_device)

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        assert self._same_results is not None
        if closure_loss.numel() == 1 and self._same_results.is_due("loss"):
            self._same_results.check_loss(closure_loss)
        super().pre_backward(closure_loss)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        def checked() -> Any:
            result = closure()
            self._check_gradients(optimizer)
            return result

        return super().optimizer_step(optimizer, checked, model, **kwargs)

    def _check_gradients(self, optimizer: Optimizer) -> None:
        assert self.model is not None
        assert self._same_results is not None
        split = self._layers_split
        if split is None or not self._same_results.is_due(
            f"optimizer {self.optimizers.index(optimizer)}"
        ):
            return
        own = {param for group in optimizer.param_groups for param in group["params"]}
        full = {
            param: name
            for name, param in self.model.named_parameters()
            if param in own and self.engine.split.is_here(param) and not split.groups_of(param)
        }
        with self.engine.optimizer_view():
            self._same_results.check_gradients(list(full.values()), list(full))

    # What a step returns goes to code that may run on one rank only, so it is made full.

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_step():
            return full_tensor(super().training_step(*args, **kwargs))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_step():
            return full_tensor(super().validation_step(*args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_step():
            return full_tensor(super().test_step(*args, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_step():
            return full_tensor(super().predict_step(*args, **kwargs))

    @override
    def _start_engine(self) -> None:
        super()._start_engine()
        self.engine.around_backward = self._in_step  # not around hooks
        if self._layers_split is not None and self.engine.split is self._layers_split:
            self._layers_split.copy_sharded()

    @override
    def _finish_copies(self) -> None:
        super()._finish_copies()
        if self._layers_split is not None and self.engine.split is not self._layers_split:
            self._layers_split.unsplit_copies()

    def _in_step(self) -> AbstractContextManager[None]:
        """Inside, weights of split layers look full to all code but the layers' own."""
        return nullcontext() if self._layers_split is None else self._layers_split.step()

    @override
    def teardown(self) -> None:
        super().teardown()
        self._same_results = None

    def _planned_layers(self, model: torch.nn.Module) -> list[PlannedLayer]:
        """Return what the plan splits, given or found."""
        if isinstance(self._plan, dict):
            layers = list(with_tried_wrappers(match_plan(model, self._plan), self.mesh.tp))
            check_layouts(model, layers, self.mesh.tp)
            return layers
        return automatic_plan(model, self.mesh.tp).layers

    @override
    def described(
        self, module: "pl.LightningModule", precision: str, measure: Measure
    ) -> Description:
        return replace(
            super().described(module, precision, measure),
            layers=() if self.mesh.tp == 1 else self._described_layers(module),
            sequence_parallel=self._sequence_parallel,
        )

    def _described_layers(self, module: torch.nn.Module) -> Sequence[PlannedLayer]:
        """Return what a plan splits; a given one is believed, without trying it out."""
        if isinstance(self._plan, dict):
            return match_plan(module, self._plan)
        if any(param.is_meta for param in module.parameters()):
            raise ConfigError(
                f"plan='auto' tries layers of {type(module).__name__} out, but its parameters are "
                f"on meta; expected ones with values, or a plan such as "
                f"plan={{'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}}. The plan that is "
                f"found for a small model of the same class says the patterns."
            )
        return self._planned_layers(module)

    @override
    def _split_model(self) -> ModelSplit | None:
        assert self.model is not None
        model, group = self.model, self.along("tp")
        refuse_leftover_shards(model)
        check_same_model(model, group)
        if group.size == 1:  # nothing is split, so nothing has to be splittable
            return None
        layers = self._planned_layers(model)
        for tensor in (*model.parameters(), *model.buffers()):
            same = tensor.data.to(self.root_device).contiguous()
            group.broadcast(same).wait()
            tensor.data = same.to(tensor.device)
        share_random_state(group, self.root_device)
        self._layers_split = SplitModel(
            model, layers, group, sequence_parallel=self._sequence_parallel
        )
        _forget_graphs(self._layers_split.shardings)
        return self._layers_split

    @override
    def _unsplit_model(self, *, full: bool) -> None:
        if self._layers_split is not None:
            params = list(self._layers_split.shardings)
            self._layers_split.restore(full=full)
            _forget_graphs(params)
            self._layers_split = None


def _forget_graphs(params: Iterable[torch.nn.Parameter]) -> None:
    """Let parameters whose shape has changed be used in new graphs while old ones are alive.

    An old graph keeps the node that accumulates the gradient, and with it the old shape; autograd
    makes another node only when the format changes.
    """
    for param in params:
        value = param.data
        other = torch.float32 if value.dtype == torch.float64 else torch.float64
        param.data = value.new_empty(0, dtype=other)
        param.data = value
