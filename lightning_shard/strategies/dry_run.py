"""A dry run of a strategy: its own options on a world that is not there."""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_shard.environments import InProcessEnvironment
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.blocks import find_blocks
from lightning_shard.pipeline_parallel.costs import measure_blocks
from lightning_shard.pipeline_parallel.partition import BlockCosts, Partition, partition_blocks
from lightning_shard.pipeline_parallel.schedules import place_stages
from lightning_shard.planner.dry_run import dry_run
from lightning_shard.planner.report import DryRun
from lightning_shard.planner.simulated_model import WorldOptions
from lightning_shard.precision.policy import dtype_policy
from lightning_shard.strategies.model_parallel import ModelParallelStrategy
from lightning_shard.strategies.pipeline_parallel import PipelineParallelStrategy
from lightning_shard.strategies.tensor_parallel import TensorParallelStrategy
from lightning_shard.tensor_parallel.plan import PlannedLayer, match_plan
from lightning_shard.trainer._lightning import runners_of

_DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


def dry_run_of(
    strategy: ModelParallelStrategy,
    module: "pl.LightningModule",
    batch: Any,
    *,
    world_size: int,
    precision: str,
    ranks_per_node: int,
    state_values: int,
) -> DryRun:
    """Count a training step of a strategy; see `ModelParallelStrategy.dry_run`."""
    simulated = copy.copy(strategy)
    simulated.cluster_environment = InProcessEnvironment(world_size)
    dtypes = dtype_policy(precision, strategy._reduce_dtype)
    step = _Step(module, precision)
    options = WorldOptions(
        mesh=simulated.mesh,
        engine=replace(strategy._options, dtypes=dtypes),
        shard_size=simulated.shard_size,
        layers=_layers(simulated, module),
        sequence_parallel=isinstance(simulated, TensorParallelStrategy)
        and simulated._sequence_parallel,
        cut=None,
        stage_ranks=(0,),
        step=step,
        state_values=state_values,
    )
    schedule, num_microbatches = None, 1
    if isinstance(simulated, PipelineParallelStrategy) and simulated.mesh.pp > 1:
        pp, num_stages = simulated.mesh.pp, simulated.num_stages
        options = replace(
            options,
            cut=_Cut(simulated, _measured(simulated, module, batch, step)),
            stage_ranks=place_stages(simulated._schedule, pp, num_stages),
        )
        schedule, num_microbatches = simulated.schedule, simulated.num_microbatches
    return dry_run(
        module,
        step.converted(batch),
        options,
        schedule=schedule,
        num_microbatches=num_microbatches,
        placement=simulated.placement(ranks_per_node),
        dtype=_DTYPES.get(precision),
        left_out=runners_of(module),
    )


class _Step:
    """A module's training step in a precision, without a trainer."""

    def __init__(self, module: "pl.LightningModule", precision: str) -> None:
        self._plugin = _plugin(precision)
        self._num_arguments = len(inspect.signature(module.training_step).parameters)

    def __call__(self, module: Any, batch: Any) -> Any:
        with (
            patch.object(module, "log", _ignored),
            patch.object(module, "log_dict", _ignored),
            self._plugin.train_step_context(),
        ):
            return module.training_step(*(batch, 0)[: self._num_arguments])

    def converted(self, batch: Any) -> Any:
        """Convert a batch."""
        return self._plugin.convert_input(batch)


def _ignored(*_: Any, **__: Any) -> None:
    """Log nothing."""


def _plugin(precision: str) -> Precision:
    """Return Lightning's plugin of a precision that `dtype_policy` knows."""
    name: Any = precision
    if precision == "64-true":
        return DoublePrecision()
    if precision.endswith("-mixed"):
        return MixedPrecision(name, "cpu")  # where tensors without elements are
    return Precision() if precision == "32-true" else HalfPrecision(name)


def _layers(strategy: ModelParallelStrategy, module: nn.Module) -> Sequence[PlannedLayer]:
    """Return what a plan splits; a given one is believed, without trying it out."""
    if not isinstance(strategy, TensorParallelStrategy) or strategy.mesh.tp == 1:
        return ()
    if isinstance(strategy._plan, dict):
        return match_plan(module, strategy._plan)
    if any(param.is_meta for param in module.parameters()):
        raise ConfigError(
            f"plan='auto' tries layers of {type(module).__name__} out, but its parameters are on "
            f"meta; expected ones with values, or a plan such as "
            f"plan={{'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}}. The plan that is "
            f"found for a small model of the same class says the patterns."
        )
    return strategy._planned_layers(module)


def _measured(
    strategy: PipelineParallelStrategy, module: "pl.LightningModule", batch: Any, step: _Step
) -> BlockCosts | None:
    """Return the costs of the whole module's blocks, where stages are to be alike in them."""
    what: Any = strategy._balance
    if what not in ("flops", "memory"):
        return None
    kind: Literal["flops", "memory"] = what
    blocks = find_blocks(module, strategy._blocks)

    def run() -> object:  # in which tensors are made without elements
        here = apply_to_collection(batch, Tensor, lambda one: torch.zeros_like(one, device="cpu"))
        return step(module, here)

    return measure_blocks(module, blocks, run, what=kind, device=torch.device("cpu"))


class _Cut:
    """Cuts a rank's copy of the module as the strategy does."""

    def __init__(self, strategy: PipelineParallelStrategy, measured: BlockCosts | None) -> None:
        self._strategy, self._measured = strategy, measured

    def __call__(self, model: nn.Module) -> Partition:
        split: Any = self._strategy._balance
        return partition_blocks(
            model,
            find_blocks(model, self._strategy._blocks),
            num_stages=self._strategy.num_stages,
            split=split,
            measured=self._measured,
        )
