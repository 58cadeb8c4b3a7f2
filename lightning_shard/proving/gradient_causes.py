"""Experiments on a gradient that differs although the loss does not: of whom, and of what, is it?

ranks on the same samples       are they one device?     yes: the samples beside a sample count
  own gradients, before the
  average, of rank 0, 1, ...    are they equal?          no: the rank counts
                                                         yes: the number of ranks counts
"""

from functools import partial

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.proving.laboratory import Laboratory
from lightning_shard.proving.loss_causes import AVERAGES, MEAN_ADVICE
from lightning_shard.proving.records import Place, Record, Sink
from lightning_shard.proving.verdict import Cause


def cause_in_gradient(lab: Laboratory) -> Cause | None:
    """Return why a gradient differs although the loss does not; None if there is no telling."""
    if lab.first.place.phase != "backward":
        return None
    if len(lab.batches) > 1 and not lab.are_one_on_same_samples():
        return _otherwise_on_ranks(lab)
    return _no_mean(lab)


def _otherwise_on_ranks(lab: Laboratory) -> Cause | None:
    """Ranks that are given the same batch: does the gradient depend on which rank, or how many?"""
    place, own = lab.first.place, _own_gradients(lab)
    if 0 not in own or len(own) < len(lab.batches):
        return None
    for rank, gradients in own.items():
        at = _first_apart(lab, own[0], gradients)
        if at is not None:
            return Cause(
                name="rank dependent",
                because="the loss is the same on all ranks and its gradient is not: something in "
                f"the backward pass depends on the rank (a detach, a hook, a function of one's "
                f"own), so that rank {rank} has another gradient than rank 0",
                evidence=f"on the same batch, with the same weights, the norm of the gradient of "
                f"{place.name!r} is {float(own[0][at].norm()):.6g} on rank 0 and "
                f"{float(gradients[at].norm()):.6g} on rank {rank}",
                advice="let every rank compute the same, also what has no gradient",
            )
    return Cause(
        name="number of ranks",
        because="the loss is right and its gradient is not: something in the backward pass (a "
        "hook, a function of one's own) multiplies, divides or adds up over the ranks, and the "
        "strategies have averaged over them already",
        evidence=f"on the same batch all ranks have the same gradient of {place.name!r}, and one "
        "device has another",
        advice="leave the number of ranks and collective calls out of the backward pass",
    )


def _own_gradients(lab: Laboratory) -> dict[int, list[Tensor]]:
    """Return by rank its gradients of a parameter, before ranks average, of the same samples."""
    sink = Sink()
    lab.subject.on_ranks(
        [lab.in_the_step(one, lab.batches[0]) for one in lab.batches],
        change=partial(_note_own_gradients, sink, lab.first.place),
        strategy="shard_ddp",
        num_ranks=len(lab.batches),
    )
    return {rank: sink.records[rank].values[lab.first.place] for rank in sorted(sink.records)}


def _note_own_gradients(sink: Sink, place: Place, module: pl.LightningModule) -> None:
    param = dict(module.named_parameters())[place.name]
    param.register_hook(partial(_note, sink, place))  # type: ignore[no-untyped-call]


def _note(sink: Sink, place: Place, grad: Tensor) -> None:
    rank = dist.get_rank()
    sink.records.setdefault(rank, Record(rank=rank)).add(place, grad)


def _first_apart(lab: Laboratory, expected: list[Tensor], got: list[Tensor]) -> int | None:
    """Return the first of the backward passes on the same samples in which two ranks differ."""
    begin = lab.first.place.step * lab.subject.accumulate
    for at, (one, two) in enumerate(zip(expected, got, strict=False)):
        if at >= begin and not lab.same(two, one, float(one.abs().max())):
            return at
    return None


def _no_mean(lab: Laboratory) -> Cause | None:
    """Return that a gradient is no mean over samples; None if it is one."""
    place = lab.first.place
    found = [one.double() for one in lab.gradients_of_parts if one is not None]
    expected = lab.first.expected.double()
    if len(found) < 2 or lab.same(torch.stack(found).mean(0), expected):
        return None
    if lab.same(torch.stack(found).sum(0), expected):
        return Cause(
            name="sum",
            because="the gradient is a sum over samples: " + AVERAGES,
            evidence=f"on one device alone the gradient of {place.name!r} of the whole batch is "
            "the sum of those of its parts",
            advice=MEAN_ADVICE,
        )
    return Cause(
        name="batch dependent",
        because="the gradient is no mean over samples: what backward gives a "
        "sample depends on the other samples of its batch (a loss divided by its own value, a "
        "gradient that a hook or a function normalises or clips), and each rank has its own batch",
        evidence=f"on one device alone the gradient of {place.name!r} of the whole batch is not "
        "the mean of those of its parts",
        advice="divide by what is averaged over the ranks: "
        "self.trainer.strategy.reduce(value, reduce_op='mean')",
    )
