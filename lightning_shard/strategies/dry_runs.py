"""What a strategy says of itself before it runs: its dry run, on ranks that are not there.

These functions are methods of `DataParallelStrategy`, whose first argument is the strategy.
"""

import copy
from dataclasses import replace
from typing import Any, TypeVar, cast

import lightning.pytorch as pl

from lightning_shard.data_parallel.checkpointed_blocks import (
    ActivationCheckpointing,
    checkpointed_blocks,
)
from lightning_shard.mesh import NodePlacement
from lightning_shard.planner.description import Description, Measure
from lightning_shard.planner.report import DryRun
from lightning_shard.trainer.dry_run import dry_run_of

S = TypeVar("S")


def shard_size(strategy: Any) -> int:
    """How many of the ranks that average gradients share out a copy of the state: here, all."""
    return int(strategy.mesh.dp)


def held_besides(strategy: Any) -> list[str]:
    """Names of what each rank of a fit holds besides the bytes that can be known before it."""
    compressed = strategy._options.compression is not None
    found = [name for one in strategy.dimensions for name in one.held_besides]
    return [*["what compression keeps"] * compressed, *found]


def placement(strategy: Any, ranks_per_node: int) -> NodePlacement:
    """Say which groups reach over nodes of so many neighbouring ranks, and what is slow."""
    found: NodePlacement = strategy.mesh.placement(ranks_per_node)
    return found


def with_checkpointing(strategy: S, choice: ActivationCheckpointing | None) -> S:
    """Return a copy for a dry run, with other activations computed again."""
    made: Any = copy.copy(strategy)
    made._options = replace(made._options, activation_checkpointing=choice)
    return cast(S, made)


def dry_run(
    strategy: Any,
    module: "pl.LightningModule",
    batch: Any,
    *,
    world_size: int,
    precision: str = "32-true",
    ranks_per_node: int = 8,
    state_values: int = 2,
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
            Adam.

    Raises:
        ConfigError: Options that do not fit the world or the module, or a `training_step` that
            asks for elements.
    """
    return dry_run_of(
        strategy,
        module,
        batch,
        world_size=world_size,
        precision=precision,
        ranks_per_node=ranks_per_node,
        state_values=state_values,
    )


def described(
    strategy: Any, module: "pl.LightningModule", precision: str, measure: Measure
) -> Description:
    """Say what the ranks of a world have and do, for a dry run; nothing is set up.

    Args:
        strategy: The strategy itself.
        module: The module to describe, as in `dry_run`.
        precision: Precision string, as for the Trainer.
        measure: Measures the blocks of the module.
    """
    options = strategy._options
    dtypes = strategy._dtypes(precision)
    engine = replace(options, dtypes=dtypes, compression=None, offload=None)
    found = Description(
        mesh=strategy.mesh,
        engine=engine,
        shard_size=strategy.shard_size,
        offload=options.offload,
    )
    checkpointing = checkpointed_blocks(
        module, engine.activation_checkpointing, engine.units, reads_buffers=False
    )
    with checkpointing:  # which what is measured depends on
        for one in reversed(strategy.dimensions):
            found = one.described(found, module, measure)
    return found
