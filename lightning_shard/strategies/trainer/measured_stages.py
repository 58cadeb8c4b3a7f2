"""Measures the costs of a model's blocks in the first batch, to balance a pipeline's stages.

Rank 0 of the pipeline takes one batch before there is a loop, from a loader of its own, and runs
the module's step on it without arithmetic; the random streams and the logs are not changed.
"""

import inspect
from collections.abc import Iterator
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.extensions import instead
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.blocks import BlockList
from lightning_shard.pipeline_parallel.costs import measure_blocks
from lightning_shard.pipeline_parallel.partition import BlockCosts
from lightning_shard.strategies.trainer._lightning import training_data


def measured_costs(
    module: "pl.LightningModule",
    blocks: BlockList,
    what: Literal["flops", "memory"],
    pipeline: Collectives,
) -> BlockCosts:
    """Return the costs of the blocks in a training step; each rank of the pipeline must call."""
    if module.trainer.state.fn != TrainerFn.FITTING:
        raise ConfigError(
            f"split={what!r} measures a training step, but nothing is trained here; expected "
            f"trainer.fit. Use split='parameters', or give the first block of each stage."
        )
    costs = _measure(module, blocks, what) if pipeline.rank == 0 else None
    agreed = pipeline.broadcast_object(costs)
    assert agreed is not None
    return agreed


def _measure(
    module: "pl.LightningModule", blocks: BlockList, what: Literal["flops", "memory"]
) -> BlockCosts:
    batch = first_batch(module.trainer)
    takes = len(inspect.signature(module.training_step).parameters)
    with instead(module, "log", lambda *_, **__: None):
        return measure_blocks(
            module, blocks, lambda: module.training_step(*(batch, 0)[:takes]), what=what
        )


def first_batch(trainer: "pl.Trainer") -> Any:
    """Return the first batch of a fit's loaders, made anew; random streams are as before."""
    with isolate_rng():
        loader = training_data(trainer)
        if isinstance(loader, Iterator):
            raise ConfigError(
                f"the first batch is looked at before the fit, but the training data are a "
                f"{type(loader).__name__}, which gives each batch once; expected a loader that "
                f"begins anew, such as a DataLoader."
            )
        if not isinstance(loader, CombinedLoader):
            loader = CombinedLoader(loader, "min_size")
        batch, *_ = next(iter(loader))
    return batch
