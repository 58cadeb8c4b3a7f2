"""Whether a fit could be set up on ranks that are not there: what a strategy refuses of it."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch.optim import Optimizer

from lightning_shard.data_parallel.agreement import check_same_optimizers
from lightning_shard.data_parallel.model_split import ModelSplit, Unsplit
from lightning_shard.optim.sharded_optimizer import check_optimizer
from lightning_shard.planning.dry_run import SimulatedEnvironment
from lightning_shard.planning.simulated_model import SimulatedCollectives
from lightning_shard.strategies.dimensions.combined_split import combined
from lightning_shard.strategies.trainer._lightning import connect


class _SplitOfNobody(ModelSplit):
    """Parts of layers, or stages, on ranks that are not there."""

    def __init__(self, size: int, *, of_layers: bool) -> None:
        self.groups = (SimulatedCollectives(0, size),)
        self.groups_of_layers = self.groups if of_layers else ()

    @property
    def parts(self) -> Any:
        """The split itself, where ranks have parts of the same layers."""
        return None if self.groups_of_layers else self


def check_fit(
    strategy: Any,
    module: "pl.LightningModule",
    optimizers: Sequence[Optimizer],
    *,
    world_size: int,
    layer_sync: LayerSync | None = None,
) -> None:
    """Ask a strategy whether a fit of so many ranks could be set up, where none are there.

    Args:
        strategy: The strategy itself, which is not changed.
        module: A copy without elements, which is attached to a trainer.
        optimizers: Those of the copy.
        world_size: Number of ranks of the fit.
        layer_sync: How batch norms are to be synchronized, where the user asks for it.
    """
    asked = copy.copy(strategy)
    asked.cluster_environment = SimulatedEnvironment(world_size)
    asked.parallel_devices = [torch.device("cpu")] * world_size
    run, groups = asked.run, asked.run.groups
    groups.everybody = SimulatedCollectives(0, world_size)
    connect(asked, module, layer_sync)
    asked.model = module
    groups.make(lambda ranks: SimulatedCollectives(0, len(ranks)))
    run.setup.check(run.setup.view())
    sizes = {one.axis: asked.mesh.size(one.axis) for one in asked.dimensions}
    parts = [_SplitOfNobody(sizes[one], of_layers=one == "pp") for one in sizes if sizes[one] > 1]
    asked.optimizers = list(optimizers)
    check_same_optimizers(asked.optimizers, module, groups.everybody)
    options = replace(run.options, owned=run.setup.parameters_to_own(combined(parts)))
    held = SimpleNamespace(model=module, options=options, split=combined(parts) or Unsplit())
    held.collectives = groups.everybody
    for optimizer in asked.optimizers:
        check_optimizer(optimizer, held)
