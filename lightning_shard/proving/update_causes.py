"""Experiments on what a step leaves: buffers, weights, options of optimizers, gradients' scale."""

import math

from torch import Tensor

from lightning_shard.proving.changes import shared_storages
from lightning_shard.proving.comparison import compare
from lightning_shard.proving.laboratory import Laboratory
from lightning_shard.proving.records import RATE, Place, Run, option_of
from lightning_shard.proving.verdict import Cause, CauseName


def cause_in_update(lab: Laboratory) -> Cause | None:
    """Return why buffers or weights differ, or gradients by a factor."""
    for experiment in (_group_option, _buffer, _shared_memory, _matrices):
        found = experiment(lab)
        if found is not None:
            return found
    return None


def _group_option(lab: Laboratory) -> Cause | None:
    option = option_of(lab.first.place)
    if option is None:
        return None
    what = "the learning rate" if option == RATE else f"the optimizer's {option}"
    evidence = (
        f"one device has {_told(lab.first.expected)}, rank {lab.first.rank} {_told(lab.first.got)}"
    )
    named: CauseName = "learning rate" if option == RATE else "optimizer option"
    if lab.are_one_on_same_samples():
        return Cause(
            name=named,
            because=f"{what} is computed from what only this rank knows",
            evidence=f"{evidence}; with the same samples on all ranks they are equal",
            advice="compute it from numbers that are equal on all ranks: "
            "self.trainer.strategy.reduce(value, reduce_op='mean')",
        )
    return Cause(
        name=named,
        because=f"{what} depends on the rank or on the number of ranks",
        evidence=f"{evidence}, with the same samples on all ranks as well",
        advice="leave trainer.world_size and the rank out of it. Scaling with the samples of a "
        "step is no mistake where it is meant: scale with those of all ranks, which one device "
        "has, too",
    )


def _told(value: Tensor) -> str:
    return ", ".join(f"{float(one):.6g}" for one in value.flatten())


def _buffer(lab: Laboratory) -> Cause | None:
    place = lab.first.place
    frozen = {name for name, one in lab.subject.module.named_parameters() if not one.requires_grad}
    is_frozen = place.kind == "weight" and place.name in frozen
    if not (place.kind == "buffer" or is_frozen) or not lab.are_one_on_same_samples():
        return None
    what = "frozen parameter" if is_frozen else "buffer"
    return Cause(
        name="buffer of own samples",
        because=f"the {what} {place.name!r} is written in the step from the samples of the rank, "
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
