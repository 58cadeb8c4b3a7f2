"""Experiments on a loss: does the whole batch's follow from those of its parts, and from whose?

L(1), L(2)      one device on each rank's batch      R(1), R(2)   the ranks themselves
L(12)           one device on both

R(1) is not L(1)                       ranks compute something else than one device
L(12) is not (L(1) + L(2)) / 2         the loss is no mean over samples:
    L(111) - L(11) = L(11) - L(1)      ... but a sum, at least in part
    L(112) as weights w1, w2 have it   ... but a mean of unequal counts
    neither                            ... a sample's loss depends on the other samples
"""

import torch
from torch import Tensor

from lightning_shard.errors import ShardError
from lightning_shard.tools.proving.comparison import compare
from lightning_shard.tools.proving.laboratory import Laboratory
from lightning_shard.tools.proving.records import Record
from lightning_shard.tools.proving.verdict import Cause

AVERAGES = "the strategies average gradients over ranks, which is right for a mean over samples"
MEAN_ADVICE = (
    "take the mean (reduction='mean'), or multiply the learning rate by the number of ranks and "
    "know why"
)


def cause_in_loss(lab: Laboratory) -> Cause | None:
    """Return what is wrong with the loss; None if nothing is, or if the step returns none."""
    if lab.first.place.phase not in ("forward", "loss", "backward"):
        return None
    whole, losses = lab.loss_of_all, lab.losses_of_parts
    own = [one for one in losses if one is not None]
    got = lab.losses(lab.ranks)
    if whole is None or not got or len(own) < len(losses):
        return None
    if lab.same(torch.stack(got).mean(), whole):
        return None  # the ranks may have worked together
    if len(lab.batches) > 1:
        pairs = zip(got, own, strict=True)
        if any(not lab.same(one, two) for one, two in pairs):
            return _otherwise_on_ranks(lab)
    if len(own) > 1 and not lab.same(torch.stack(own).mean(), whole):
        return _no_mean(lab, own, whole)
    return None


def _kept(lab: Laboratory, evidence: str) -> Cause:
    names = _written(lab)
    return Cause(
        name="buffer of own samples" if names else "kept from own samples",
        because="the loss depends on something that the module keeps from batch to batch and that "
        "each rank takes from its own samples (a buffer, a frozen parameter, a number of samples, "
        "an attribute)",
        evidence=evidence + names,
        advice="keep what all ranks have together: self.trainer.strategy.reduce(value, "
        "reduce_op='mean'), reduce_op='sum' for counts",
    )


def _no_mean(lab: Laboratory, own: list[Tensor], whole: Tensor) -> Cause:
    """Return what a loss is that is no mean over samples."""
    if lab.is_kept_from_earlier_samples():
        return _kept(
            lab,
            "on one device, without updates of the weights, the loss of a batch changes with the "
            "samples of the batch before",
        )
    one, two = lab.parts[:2]
    alone, twice, thrice = (lab.loss_of([one] * times) for times in (1, 2, 3))
    assert alone is not None
    assert twice is not None
    assert thrice is not None
    told = ", ".join(f"{float(value):.6g}" for value in own)
    seen = f"one device's loss is {float(whole):.6g}, of the parts alone {told}"
    growth = twice - alone
    scale = float(alone.abs())
    if not lab.same(twice, alone, scale) and lab.same(thrice - twice, growth, scale):
        return Cause(
            name="sum",
            because="the loss is a sum over samples, or has a part that is: " + AVERAGES,
            evidence=f"{seen}; with each sample twice it grows from {float(alone):.6g} to "
            f"{float(twice):.6g}, and by as much with each sample three times",
            advice=MEAN_ADVICE,
        )
    if lab.same(twice, alone, scale) and _is_weighted(lab, one, two, own):
        return Cause(
            name="unequal counts",
            because="the loss is an average in which ranks count differently (ignored targets, "
            "padding, weights of classes): a mean of means is not the mean of all. " + AVERAGES,
            evidence=f"{seen}; with each sample twice it stays, and the weights of the parts that "
            "this needs foretell the loss with one part twice",
            advice="divide the sum by the mean count of all ranks: "
            "count = self.trainer.strategy.reduce(count, reduce_op='mean')",
        )
    return Cause(
        name="batch dependent",
        because="the loss of a sample depends on the other samples of its batch (a contrastive "
        "loss, a statistic of the batch, the hardest samples), and each rank has its own batch",
        evidence=f"{seen}; with each sample twice it is {float(twice):.6g}, and no weights of the "
        f"parts foretell the loss with one part twice{_written(lab)}",
        advice="gather what the loss compares over all ranks: self.all_gather(features, "
        "sync_grads=True); see examples/contrastive.py",
    )


def _written(lab: Laboratory) -> str:
    """Tell what the step writes from the samples of the batch, and may have computed with."""
    module = lab.subject.module
    frozen = {name for name, one in module.named_parameters() if not one.requires_grad}
    step = lab.first.place.step
    found = compare(lab.ranks, lab.alone, lab.tolerance).counting
    places = [one.place for one in found if one.place.step == step]
    kept = (one for one in places if one.kind == "buffer" or one.name in frozen)
    names = list(dict.fromkeys(one.name for one in kept))
    told = ", ".join(map(repr, names[:3])) + (" and others" if len(names) > 3 else "")
    return f"; from its samples the step writes {told}" if names else ""


def _is_weighted(lab: Laboratory, one: object, two: object, own: list[Tensor]) -> bool:
    """Whether the loss is a mean with weights: those of two parts foretell that of three."""
    both, more = lab.loss_of([one, two]), lab.loss_of([one, one, two])
    assert both is not None
    assert more is not None
    if lab.same(own[0], own[1], float(own[0].abs())):
        return False
    share = (both - own[1]) / (own[0] - own[1])  # of the first part
    if not 0.0 <= float(share) <= 1.0:
        return False
    foretold = (2 * share * own[0] + (1 - share) * own[1]) / (1 + share)
    scale = max(float(one.abs()) for one in (*own, more))  # the share's error is of this size, too
    return abs(float(foretold - more)) <= 10 * lab.tolerance * scale


def _otherwise_on_ranks(lab: Laboratory) -> Cause | None:
    """Ranks that are given the same batch: do they differ from each other, or from one device?"""
    run = lab.ranks_as_rank_0
    if lab.first.place.step > 0 and lab.is_one_on_same_samples_from_the_start:
        return _kept(
            lab,
            "with the same samples on all ranks in this step they differ, and with the same in "
            "all steps they do not",
        )
    losses, (expected,) = lab.losses(run), lab.losses(lab.alone_as_rank_0)
    for rank, loss in enumerate(losses):
        if not lab.same(loss, losses[0]):
            first, other = (records[0] for records in (run.by_data_rank[0], run.by_data_rank[rank]))
            return Cause(
                name="rank dependent",
                because=f"the step depends on the rank: rank {other.rank} computes something else "
                f"than rank {first.rank}{_first_apart(lab, first, other)}",
                evidence=f"on the same batch, with the same weights, rank {first.rank} has the "
                f"loss {float(losses[0]):.6g} and rank {other.rank} {float(loss):.6g}",
                advice="let every rank compute the same; what only one has to do (printing, "
                "saving) must not change the loss",
            )
    if lab.same(losses[0], expected):
        return None
    return _number_of_ranks(lab, losses[0], expected)


def _first_apart(lab: Laboratory, first: Record, other: Record) -> str:
    for place, values in first.values.items():
        theirs = other.values.get(place)
        is_here = place.kind == "output" and place.step == lab.first.place.step
        if not is_here or theirs is None or len(theirs) != len(values):
            continue
        if any(not lab.same(two, one) for one, two in zip(values, theirs, strict=True)):
            return f", first in the forward of {place.name!r}"
    return ""


def _number_of_ranks(lab: Laboratory, got: Tensor, expected: Tensor) -> Cause:
    number = len(lab.batches)
    gathers = lab.ranks.records[0].num_gathers
    evidence = (
        f"on the same batch every rank of {number} has the loss {float(got):.6g}, one device "
        f"{float(expected):.6g}"
    )
    for factor, how in ((float(number), "multiplied"), (1.0 / number, "divided")):
        if lab.same(got, expected * factor) and not gathers:
            return Cause(
                name="number of ranks",
                because=f"the loss is {how} by the number of ranks, which the strategies have "
                "averaged over already",
                evidence=evidence,
                advice="leave the number of ranks out of the loss",
            )
    term = (got - expected) / (number - 1)
    more = _with_another_rank(lab)
    is_linear = more is not None and lab.same(more - got, term, float(expected.abs()))
    seen = f"; with {number + 1} ranks {float(more):.6g}" if more is not None else ""
    called = f"; self.all_gather is called {gathers} times" if gathers else ""
    if is_linear:
        return Cause(
            name="counted once per rank",
            because=f"a term of the loss, {float(term):.6g}, is counted once for each rank",
            evidence=f"{evidence}{seen}: it grows by this term with each rank{called}",
            advice="what all ranks have alike (a penalty on weights) belongs into the loss once, "
            "without a gather or a sum over ranks",
        )
    return Cause(
        name="number of ranks",
        because="the loss depends on the number of ranks",
        evidence=f"{evidence}{seen}{called}",
        advice="look for collective calls and trainer.world_size in the step",
    )


def _with_another_rank(lab: Laboratory) -> Tensor | None:
    number = len(lab.batches) + 1
    batches = [lab.batches[0]] * number
    try:
        run = lab.subject.on_ranks(batches, strategy="shard_ddp", num_ranks=number)
    except ShardError:
        return None
    losses = lab.losses(run)
    return losses[0] if losses else None
