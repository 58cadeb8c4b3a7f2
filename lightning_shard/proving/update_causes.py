"""Experiments on what a step leaves: buffers, weights, learning rates, the scale of gradients."""

import math

from torch import Tensor

from lightning_shard.proving.changes import shared_storages
from lightning_shard.proving.comparison import compare
from lightning_shard.proving.laboratory import Laboratory
from lightning_shard.proving.records import Place, Run
from lightning_shard.proving.verdict import Cause


def cause_in_update(lab: Laboratory) -> Cause | None:
    """Return why buffers or weights differ, or gradients by a factor."""
    for experiment in (_learning_rate, _buffer, _shared_memory, _matrices):
        found = experiment(lab)
        if found is not None:
            return found
    return None


def _learning_rate(lab: Laboratory) -> Cause | None:
    if not lab.first.place.name.startswith("the learning rate"):
        return None
    return Cause(
        name="learning rate",
        because="the learning rate is computed from what only this rank knows",
        evidence=f"one device has {float(lab.first.expected):.6g}, rank {lab.first.rank} "
        f"{float(lab.first.got):.6g}",
        advice="compute it from numbers that are equal on all ranks: "
        "self.trainer.strategy.reduce(value, reduce_op='mean')",
    )


def _buffer(lab: Laboratory) -> Cause | None:
    place = lab.first.place
    if place.kind != "buffer":
        return None
    on_ranks = lab.ranks_as_rank_0.records[0].values.get(place)
    alone = lab.alone_as_rank_0.records[0].values.get(place)
    if on_ranks is None or alone is None or not lab.same(on_ranks[-1], alone[-1], 1.0):
        return None
    return Cause(
        name="buffer of own samples",
        because=f"the buffer {place.name!r} is written in the step from the samples of the rank, "
        "and rank 0's values are kept",
        evidence="with the same samples on all ranks it is one device's",
        advice="average what is written over the ranks first: "
        "self.trainer.strategy.reduce(value, reduce_op='mean')",
    )


def _shared_memory(lab: Laboratory) -> Cause | None:
    name = lab.first.place.name
    for one, two in shared_storages(lab.subject.module):
        if name in (one, two) or name.endswith((f" of {one}", f" of {two}")):
            other = two if name == one else one
            return Cause(
                name="shared memory",
                because=f"{one!r} and {two!r} are two parameters in the same memory (assigned by "
                f".data), so that on one device an update of {other!r} changes {name!r} as well; "
                "the strategies give each parameter memory of its own",
                evidence="their storages begin at the same address",
                advice=f"tie them as one parameter: {two} = {one}, without .data",
            )
    return None


def _matrices(lab: Laboratory) -> Cause | None:
    """With full parameters on every rank, is the update right?"""
    if lab.first.place.phase != "update" or lab.first.place.kind != "weight":
        return None
    ranks = lab.subject.on_ranks(lab.batches, strategy="shard_ddp", num_ranks=len(lab.batches))
    found = compare(ranks, lab.alone_again, lab.tolerance)
    if [one for one in found.counting if one.place.kind in ("weight", "gradient", "loss")]:
        return None
    return Cause(
        name="full matrices",
        because="the optimizer's update of an element depends on other elements of its parameter, "
        "and the strategy gives it shards",
        evidence="the gradients are one device's; under shard_ddp, which keeps parameters full, so "
        "are the weights",
        advice="use strategy='shard_ddp', or an element-wise optimizer such as AdamW",
    )


def accumulated_multiple(
    alone: Run, whole: Run, tolerance: float
) -> tuple[Place, Tensor, Tensor, float] | None:
    """Return where accumulated gradients are a multiple of those of one large batch, and of what.

    Args:
        alone: One device, which accumulates.
        whole: One device, each step's batches in one.
        tolerance: Relative deviation that rounding explains.
    """
    ratio = math.nan
    worst: tuple[Place, Tensor, Tensor] | None = None
    expected = whole.records[0].values
    for place, values in alone.records[0].values.items():
        if place.phase != "backward" or place.step > 0 or place not in expected:
            continue
        got, want = values[-1].double(), expected[place][-1].double()
        size = float((want * want).sum())
        if size < 1e-18:
            continue
        factor = float((got * want).sum()) / size
        ratio = factor if math.isnan(ratio) else ratio
        is_multiple = float((got - ratio * want).abs().max()) <= 1e3 * tolerance * math.sqrt(size)
        if not is_multiple:
            return None
        worst = worst or (place, got, want)
    if worst is None or abs(ratio - 1.0) < 1e-4:
        return None
    return *worst, ratio
