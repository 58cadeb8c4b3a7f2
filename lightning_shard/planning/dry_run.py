"""A dry run: one step of a strategy on a simulated world, counted by the code that would train.

    options + module ──> the ranks of one pipeline ──> a step ──> DryRun
                         (one of each tp and dp group)

No data is moved and no memory taken: 4,096 ranks take no longer than the ranks of one pipeline.
"""

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, Protocol
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning_shard.core._lightning import own_trainer, runners_of
from lightning_shard.core.mesh import NodePlacement
from lightning_shard.environments.started_elsewhere import InProcessEnvironment
from lightning_shard.pipeline_parallel.blocks import BlockList
from lightning_shard.pipeline_parallel.costs import FlopCounter, measure_blocks
from lightning_shard.pipeline_parallel.microbatches import BatchReader, batch_size_of, split_batch
from lightning_shard.pipeline_parallel.partition import BlockCosts
from lightning_shard.planning.description import Description, Measure, WorldOptions
from lightning_shard.planning.report import ActivationBytes, DryRun, RankFigures
from lightning_shard.planning.simulated_model import NoElements, SimulatedModel, loss_of
from lightning_shard.planning.simulated_step import (
    SimulatedPipeline,
    SimulatedRank,
    StepTrace,
    apart,
    run_unpipelined,
    trace_step,
)
from lightning_shard.precision.policy import TRUE_DTYPES


class Describable(Protocol):
    """The attributes and methods of a strategy that a dry run uses."""

    cluster_environment: Any

    @property
    def held_besides(self) -> Sequence[str]:
        """Names of what its ranks hold besides what is counted."""

    def described(
        self, module: "pl.LightningModule", precision: str, measure: Measure
    ) -> Description:
        """Return the description of the strategy's ranks on the simulated world."""

    def placement(self, ranks_per_node: int) -> NodePlacement:
        """Return the placement of the groups on nodes of so many neighbouring ranks."""


def dry_run(
    strategy: Describable,
    module: "pl.LightningModule",
    batch: Any,
    *,
    world_size: int,
    precision: str = "32-true",
    ranks_per_node: int = 8,
    state_values: float = 2,
) -> DryRun:
    """Count what a training step takes on each rank of a world that is not there.

    Nothing is sent, computed or kept: the module may be larger than any memory.

    Args:
        strategy: The strategy itself.
        module: As for `trainer.fit`; its parameters may be on meta, and it needs no trainer.
        batch: Batch of a data-parallel rank's loader; its tensors may be on meta.
        world_size: Ranks of that world.
        precision: As for the Trainer.
        ranks_per_node: Ranks that share a node's fast links.
        state_values: Number of values that the optimizer keeps for each trained element: 2 of
            Adam, or 0.51 where those lie in 8 bits and blocks of 256.

    Raises:
        ConfigError: Options that do not fit the world or the module, or a `training_step` that
            asks for elements.
    """
    world = SimulatedWorld(strategy, module, batch, world_size, precision, state_values)
    options = world.options
    with world.model() as (model, batch):
        size = batch_size_of(batch)
        if options.schedule is None:
            (full,) = split_batch(batch, 1, BatchReader("fields"))
            ranks = [SimulatedRank(0, model)]
            kept = [run_unpipelined(ranks[0], full)]
            idle: tuple[float, ...] = (0.0,)
            table = None
        else:
            parts = split_batch(batch, min(options.num_microbatches, size), BatchReader("fields"))
            table = options.schedule(len(parts))
            pipeline = SimulatedPipeline(model, table, parts)
            pipeline.run()
            ranks, idle = pipeline.ranks, pipeline.timeline.idle_shares
            kept = [pipeline.activations_of(rank) for rank in ranks]
        figures = tuple(map(_figures, ranks, kept, idle))
    return DryRun(
        mesh=options.mesh,
        placement=world.strategy.placement(ranks_per_node),
        num_parameters=sum(param.numel() for param in module.parameters()),
        zero_stage=options.engine.stage,
        schedule="" if table is None else table.name,
        num_microbatches=1 if table is None else table.num_microbatches,
        batch_size=size * options.num_with_samples,
        ranks=figures,
        not_counted=tuple(strategy.held_besides),
    )


def _figures(rank: SimulatedRank, activations: ActivationBytes, idle_share: float) -> RankFigures:
    memory = rank.memory(activations)
    rank.count()  # what publishing the updated parameters has sent
    return RankFigures(
        stages=rank.stages,
        num_blocks=rank.num_blocks,
        num_parameters=rank.num_own_parameters,
        memory=memory,
        sent=dict(rank.sent),
        idle_share=idle_share,
        sent_elements=dict(rank.sent_elements),
    )


def trace_of(
    strategy: Describable,
    module: "pl.LightningModule",
    batch: Any,
    *,
    world_size: int,
    precision: str,
) -> StepTrace:
    """Trace a step of one rank of a strategy without a pipeline: see `trace_step`."""
    world = SimulatedWorld(strategy, module, batch, world_size, precision, state_values=2)
    with world.model() as (model, content):
        return trace_step(model, content)


class SimulatedEnvironment(InProcessEnvironment):
    """Answers for one rank of a world that is not there, also where ranks of another one run."""

    def __init__(self, num_ranks: int, rank: int = 0) -> None:
        super().__init__(num_ranks)
        self._rank = rank

    @override
    def world_size(self) -> int:
        return self._num_ranks

    @override
    def set_world_size(self, size: int) -> None:
        """Do nothing: the world is given."""

    @override
    def global_rank(self) -> int:
        return self._rank


class SimulatedWorld:
    """A strategy's description of itself on ranks that are not there, for one module and batch.

    Attributes:
        strategy: A copy of the strategy on the simulated world.
        batch: The batch of one data-parallel rank in the run's precision.
        dtype: Format of the parameters; None leaves each its own.
    """

    def __init__(
        self,
        strategy: Describable,
        module: "pl.LightningModule",
        batch: Any,
        world_size: int,
        precision: str,
        state_values: float,
    ) -> None:
        self.strategy = copy.copy(strategy)
        self.strategy.cluster_environment = SimulatedEnvironment(world_size)
        step = _TrainingStep(module, precision)
        described = self.strategy.described(
            module, precision, lambda blocks, what: _measured(module, batch, step, blocks, what)
        )
        self.batch = step.converted(batch)
        self.dtype = TRUE_DTYPES.get(precision)
        self.options = WorldOptions(**vars(described), step=step, state_values=state_values)
        self._module = module

    @contextmanager
    def model(self) -> Iterator[tuple[SimulatedModel, Any]]:
        """Yield a model of the module, which is not changed, and the batch, without elements."""
        stand_ins, left_out = NoElements(), runners_of(self._module)
        batch = stand_ins.batch(self.batch)
        with apart(stand_ins):
            copied = stand_ins.module(self._module, dtype=self.dtype, left_out=left_out)
            yield SimulatedModel(copied.train(), self.options), batch


def step_flops(
    module: "pl.LightningModule", batch: Any, blocks: BlockList, precision: str
) -> BlockCosts:
    """Return the operations of a forward's matrix products, attention and convolutions.

    Blocks that a step does not call count as "before".
    """
    step = _TrainingStep(module, precision)
    return _measured(module, step.converted(batch), step, blocks, "flops")


def flops_of_batch(module: "pl.LightningModule", batch: Any, precision: str) -> int:
    """Return the operations of forward and backward of one batch, of the full model.

    Counted are matrix products, attention and convolutions, by torch's FlopCounterMode on tensors
    without elements; the module, on any device or meta, is not changed. What is computed again for
    backward is no work of the model, so that more than three forwards, one and two for backward,
    never count.

    Source: model FLOPs utilization, PaLM, arXiv:2204.02311, appendix B.

    Raises:
        Exception: The step asks for elements or for a trainer, or returns no loss.
    """
    step, stand_ins = _TrainingStep(module, precision), NoElements()
    dtype, left_out = TRUE_DTYPES.get(precision), runners_of(module)
    batch = stand_ins.batch(step.converted(batch))
    with apart(stand_ins), torch.enable_grad(), FlopCounter() as counter:
        copied = stand_ins.module(module, dtype=dtype, left_out=left_out).train()
        loss = loss_of(step(copied, batch))
        forward: int = counter.total
        loss.backward()  # type: ignore[no-untyped-call]
        total: int = counter.total
    return min(total, 3 * forward)


class _TrainingStep:
    """A module's training step in a precision, under a trainer of which nothing comes."""

    def __init__(self, module: "pl.LightningModule", precision: str) -> None:
        self._plugin = _plugin(precision)
        self._num_arguments = len(inspect.signature(module.training_step).parameters)

    def __call__(self, module: Any, batch: Any) -> Any:
        with attached(module) as strategy, self._plugin.train_step_context():
            result = module.training_step(*(batch, 0)[: self._num_arguments])
        losses = [] if module.automatic_optimization else strategy.losses
        return sum(loss.sum() for loss in losses) if losses else result

    def converted(self, batch: Any) -> Any:
        """Convert a batch to the precision."""
        return self._plugin.convert_input(batch)


class _DryStrategy(SingleDeviceStrategy):
    """A strategy of one device under which steps by hand change nothing."""

    losses: Sequence[Tensor] = ()  # whose backward a step has called
    refusal: str = ""  # what configure_optimizers has raised; who asks for optimizers has none

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.losses = [*self.losses, closure_loss]
        return closure_loss

    @override
    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        return closure()


@cache
def _dry_trainer() -> "pl.Trainer":
    strategy = _DryStrategy(torch.device("cpu"))
    return pl.Trainer(strategy=strategy, logger=False, max_epochs=-1, max_steps=1000)


@contextmanager
def attached(module: "pl.LightningModule") -> Iterator[Any]:
    """Give a module a trainer inside of which nothing comes, and the optimizers that it makes."""
    trainer, before = _dry_trainer(), own_trainer(module)
    strategy: Any = trainer.strategy
    strategy.losses, strategy.optimizers, strategy.refusal = (), [], ""
    trainer.state.fn, trainer.training = TrainerFn.FITTING, True
    strategy.connect(module)
    module.trainer = trainer
    try:
        with patch.multiple(module, log=_ignored, log_dict=_ignored):
            try:
                strategy.setup_optimizers(trainer)
            except Exception as error:  # whatever the user's code raises: a plan tells it
                strategy.refusal = f"{type(error).__name__}: {error}"
            yield strategy
    finally:
        module.trainer = before


def _ignored(*_: Any, **__: Any) -> None:
    """Do nothing with a logged value."""


def _plugin(precision: str) -> Precision:
    """Return Lightning's plugin of a precision that `dtype_policy` knows."""
    name: Any = precision
    if precision == "64-true":
        return DoublePrecision()
    if precision.endswith("-mixed"):
        return MixedPrecision(name, "cpu")  # where tensors without elements are
    return Precision() if precision == "32-true" else HalfPrecision(name)


def _measured(
    module: "pl.LightningModule",
    batch: Any,
    step: _TrainingStep,
    blocks: BlockList,
    what: Literal["flops", "memory"],
) -> BlockCosts:

    def run() -> object:  # in which tensors are made without elements
        here = apply_to_collection(batch, Tensor, lambda one: torch.zeros_like(one, device="cpu"))
        return step(module, here)

    return measure_blocks(module, blocks, run, what=what, device=torch.device("cpu"))
