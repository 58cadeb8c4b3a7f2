"""A dry run: one step of a simulated world, counted by the code that would train in it.

    options + module ──> the ranks of one pipeline ──> a step ──> DryRun
                         (one of each tp and dp group)

No data is moved and no memory taken: 4,096 ranks take no longer than the ranks of one pipeline.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_shard.mesh import NodePlacement
from lightning_shard.pipeline_parallel.batch_reading import BatchReader
from lightning_shard.pipeline_parallel.costs import FlopCounter
from lightning_shard.pipeline_parallel.microbatches import batch_size_of, split_batch
from lightning_shard.pipeline_parallel.simulation import replay
from lightning_shard.pipeline_parallel.skipped_blocks import uncompiled
from lightning_shard.planner.activation_bytes import ActivationBytes
from lightning_shard.planner.description import Step, WorldOptions
from lightning_shard.planner.no_elements import NoElements
from lightning_shard.planner.report import DryRun, RankFigures
from lightning_shard.planner.simulated_model import ProductsOfGroups, SimulatedModel, loss_of
from lightning_shard.planner.simulated_rank import SimulatedRank
from lightning_shard.planner.simulation import SimulatedPipeline, run_unpipelined


def dry_run(
    module: nn.Module,
    batch: Any,
    options: WorldOptions,
    *,
    placement: NodePlacement,
    dtype: torch.dtype | None = None,
    left_out: tuple[object, ...] = (),
    not_counted: tuple[str, ...] = (),
) -> DryRun:
    """Count what a training step takes on every rank of a simulated world.

    Args:
        module: The full module, with parameters on any device, meta included; it is not changed.
        batch: Batch of one data-parallel rank: only its shapes count, so it may be on meta.
        options: Options that all ranks of the world have in common.
        placement: Placement of the mesh on nodes.
        dtype: Format of the parameters; None leaves each its own.
        left_out: Objects that the module refers to and its copy must not.
        not_counted: Names of what ranks hold besides.

    Raises:
        ConfigError: The step asks for elements, or the model cannot be split as asked.
    """
    stand_ins = NoElements()
    batch = stand_ins.batch(batch)
    size = batch_size_of(batch)
    with apart():
        copied = stand_ins.module(module, dtype=dtype, left_out=left_out)
        model = SimulatedModel(copied.train(), options)
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
            ranks, idle = pipeline.ranks, replay(table).idle_shares
            kept = [pipeline.peak_activations(rank) for rank in ranks]
        figures = tuple(map(_figures, ranks, kept, idle))
    return DryRun(
        mesh=options.mesh,
        placement=placement,
        num_parameters=sum(param.numel() for param in module.parameters()),
        zero_stage=options.engine.stage,
        schedule="" if table is None else table.name,
        num_microbatches=1 if table is None else table.num_microbatches,
        batch_size=size * options.mesh.dp * options.mesh.size("ep"),
        ranks=figures,
        not_counted=not_counted,
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


@contextmanager
def apart() -> Iterator[None]:
    """Restore the random streams and suppress warnings; compiled code runs as written inside."""
    products: Any = ProductsOfGroups  # which torch does not annotate
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), products(), uncompiled():
        warnings.simplefilter("ignore")  # of addresses that tensors without elements do not have
        yield


def model_flops(
    module: nn.Module,
    batch: Any,
    step: Step,
    *,
    dtype: torch.dtype | None = None,
    left_out: tuple[object, ...] = (),
) -> int:
    """Return the operations of forward and backward of one batch, of the full model.

    Counted are matrix products, attention and convolutions of forward and backward, by torch's
    FlopCounterMode on tensors without elements. What is computed again for backward is no work of
    the model, so that more than three forwards, one and two for backward, never count.

    Source: model FLOPs utilization, PaLM, arXiv:2204.02311, appendix B.

    Args:
        module: The full module, with parameters on any device, meta included; it is not changed.
        batch: Batch of which only shapes count.
        step: Runs the module's training step.
        dtype: Format of the parameters; None leaves each its own.
        left_out: Objects that the module refers to and its copy must not.

    Raises:
        Exception: The step asks for elements or for a trainer, or returns no loss.
    """
    stand_ins = NoElements()
    batch = stand_ins.batch(batch)
    with apart(), torch.enable_grad(), FlopCounter() as counter:
        copied = stand_ins.module(module, dtype=dtype, left_out=left_out).train()
        loss = loss_of(step(copied, batch))
        forward: int = counter.total
        loss.backward()  # type: ignore[no-untyped-call]
        total: int = counter.total
    return min(total, 3 * forward)
