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
