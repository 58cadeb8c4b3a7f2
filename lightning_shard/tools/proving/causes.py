"""Finds out why ranks and one device differ, by experiments in the order of how much they explain.

    has the loss of one device run away?                            divergence
    does one device differ from itself, with the same seed?         an attribute of a class
    does one device differ from itself, with another seed?          random numbers, dropout
    is it gone with fixed statistics?                               batch norm
    does one device's loss of a batch follow from its parts' losses? sum, unequal counts, batch
    do ranks compute otherwise what one device is given as well?    rank, number of ranks
    is it gone without a hook, a callback, with shard_ddp?          edits, matrices
    is a gradient otherwise on ranks, or no mean of its parts?      rank, number of ranks, batch

Each changes one thing and runs again; nothing is guessed from names.
"""

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.errors import ShardError
from lightning_shard.tools.proving import changes
from lightning_shard.tools.proving.changes import shared_storages
from lightning_shard.tools.proving.comparison import compare
from lightning_shard.tools.proving.laboratory import Laboratory
from lightning_shard.tools.proving.records import (
    RATE,
    Place,
    Record,
    Records,
    Sink,
    bare_name,
    option_of,
)
from lightning_shard.tools.proving.runs import RunFailedError, Subject
from lightning_shard.tools.proving.verdict import Cause, CauseName

_DIVERGED = 1e6  # times the first loss

Experiment = Callable[[Laboratory], Cause | None]


def find_cause(lab: Laboratory) -> Cause:
    """Return why the ranks differ; experiments that fail say nothing."""
    for experiment in _EXPERIMENTS:
        try:
            found = experiment(lab)
        except (RunFailedError, ShardError):
            continue
        if found is not None:
            return found
    return Cause(
        "unknown",
        "none of the experiments explains it",
        "random numbers, batch norms, the loss of the batch's parts, equal batches on all "
        "ranks, hooks and callbacks were tried, each by itself",
        "look at the tensor that is named above, on that rank; "
        "strategy='shard_ddp' is the simplest case to compare with",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (" and others" if len(names) > 3 else "")


def _divergence(lab: Laboratory) -> Cause | None:
    values, last = lab.alone.records[0].values.items(), lab.first.place.step
    losses = [float(of[-1]) for place, of in values if place.kind == "loss" and place.step <= last]
    if all(abs(one) <= _DIVERGED * max(1.0, abs(losses[0])) for one in losses):  # not so of NaN
        return None
    return Cause(
        "divergence",
        f"the fit diverges, on one device too: its loss goes from {losses[0]:.3g} to "
        f"{losses[-1]:.3g}, and rounding grows with it",
        "the losses of one device up to this step",
        "prove with a smaller learning rate, or with clipped gradients",
    )


def _batch_norm(lab: Laboratory) -> Cause | None:
    names = changes.batch_norms_of(lab.subject.module)
    if not names or not lab.vanishes(changes.with_fixed_statistics):
        return None
    return Cause(
        "batch norm",
        f"batch norm in {_some(names)}: each rank normalises by the statistics of its own samples",
        "with fixed statistics the ranks and one device are equal",
        "pass Trainer(sync_batchnorm=True), or take a norm of single samples (GroupNorm, "
        "LayerNorm); with large batches on each rank it is often left as it is",
    )


# Hooks of parameters, of the module and of callbacks, each left out by itself.


def _gathers(lab: Laboratory) -> Cause | None:
    gathers = lab.ranks.records[0].num_gathers
    if not gathers or not lab.vanishes(changes.with_gathered_gradients):
        return None
    return Cause(
        "gather without gradients",
        "self.all_gather(...) is called without sync_grads=True, so that what the other "
        "ranks have given gets no gradient",
        f"{gathers} calls; with sync_grads=True the ranks and one device are equal",
        "pass sync_grads=True",
    )


def _parameter_hooks(lab: Laboratory) -> Cause | None:
    names = changes.hooked_parameters(lab.subject.module)
    if not names or not lab.vanishes(changes.without_parameter_hooks):
        return None
    return Cause(
        "parameter hook",
        f"the hook on {', '.join(map(repr, names[:3]))} edits the gradient of each rank's "
        "own samples, before it is averaged, by something that is no multiple of it",
        "without parameters' hooks the ranks and one device are equal",
        "edit the averaged gradient, in on_before_optimizer_step",
    )


def _backward_hooks(lab: Laboratory) -> Cause | None:
    names = changes.modules_with_backward_hooks(lab.subject.module)
    if not names or not lab.vanishes(changes.without_backward_hooks):
        return None
    who = f"the backward hook on {', '.join(map(repr, names[:3]))}"
    return _by_what(lab, "module hook", who, "without modules' backward hooks")


def _module_hooks(lab: Laboratory) -> Cause | None:
    for name in changes.overridden_hooks(lab.subject.module):
        if not lab.vanishes(changes.without_hook(name)):
            continue
        is_clipping = name == "configure_gradient_clipping"
        is_rate = option_of(lab.first.place) == RATE
        named: CauseName = (
            "clipping" if is_clipping else "learning rate" if is_rate else "module hook"
        )
        return _by_what(lab, named, f"the module's {name}", f"without {name}")
    return None


def _by_what(lab: Laboratory, named: CauseName, who: str, without: str) -> Cause:
    """Return what a hook depends on: a rank's samples, or the number of ranks."""
    evidence = f"{without} the ranks and one device are equal"
    because = f"{who} does something else on a rank than on one device: "
    if lab.are_one_on_same_samples():
        return Cause(
            named,
            because + "it uses what only this rank knows, its loss or its samples",
            evidence + "; with the same samples on all ranks they are, too",
            "let all ranks compute from the same numbers: average them first, "
            "self.trainer.strategy.reduce(value, reduce_op='mean')",
        )
    return Cause(
        named,
        because + "it uses the rank, the number of ranks, or a collective call",
        evidence + "; with the same samples on all ranks they still differ",
        "leave ranks and sums over them out of it: the strategy has averaged the gradients already",
    )


def _callbacks(lab: Laboratory) -> Cause | None:
    callbacks = list(lab.subject.options.get("callbacks") or ())
    for at, one in enumerate(callbacks):
        options = changes.without_callback(at, lab.subject.options)
        if lab.vanishes(lambda _: None, subject=replace(lab.subject, options=options)):
            return _by_what(lab, "callback", f"the callback {type(one).__name__}", "without it")
    return None


def log_cause(lab: Laboratory, place: Place) -> Cause:
    """Return why a metric differs while all that is trained is equal."""
    found = [records[0].values[place][-1].double() for records in lab.ranks.by_data_rank]
    expected = lab.alone.records[0].values[place][-1].double()
    values = torch.stack(found)
    is_common = bool((values == values[0]).all())
    if is_common or bare_name(place.name) not in lab.ranks.records[0].unsynced:
        return _averaged_log(place.name, values, expected)
    if lab.same(values.mean(0), expected, 1.0):
        evidence = f"the ranks' mean, {float(values.mean()):.6g}, is one device's"
        advice = f"self.log({place.name!r}, ...) without rank_zero_only"
    elif lab.same(values.sum(0), expected, 1.0):
        evidence = f"the ranks' sum, {float(values.sum()):.6g}, is one device's"
        advice = f"self.log({place.name!r}, ..., reduce_fx='sum') without rank_zero_only"
    else:
        evidence = "neither the ranks' mean nor their sum is one device's"
        advice = "log a torchmetrics.Metric, which adds up what it needs over the ranks"
    return Cause(
        "unsynchronised log",
        f"{place.name!r} is logged with rank_zero_only=True, or for a group of ranks: each "
        "has the value of its own samples, and loggers get rank 0's",
        evidence,
        advice,
    )


def _averaged_log(name: str, values: Tensor, expected: Tensor) -> Cause:
    return Cause(
        "averaged log",
        f"{name!r} is brought together over the ranks, but what they have is not what one "
        "device makes of all samples: a function of a mean (an exponential, a root, a ratio), a "
        "sum, or a mean of unequal counts",
        f"it is logged for an epoch, with sync_dist=True or as a metric; rank 0 has "
        f"{float(values[0]):.6g}, one device {float(expected):.6g}",
        "log what is a mean over samples and compute the rest from it afterwards, or log a "
        "torchmetrics.Metric, which adds up what it needs over the ranks",
    )


# Experiments on a gradient that differs although the loss does not: of whom, and of what, is it?
#
# ranks on the same samples       are they one device?     yes: the samples beside a sample count
#   own gradients, before the
#   average, of rank 0, 1, ...    are they equal?          no: the rank counts
#                                                          yes: the number of ranks counts


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
                "rank dependent",
                "the loss is the same on all ranks and its gradient is not: something in "
                f"the backward pass depends on the rank (a detach, a hook, a function of one's "
                f"own), so that rank {rank} has another gradient than rank 0",
                f"on the same batch, with the same weights, the norm of the gradient of "
                f"{place.name!r} is {float(own[0][at].norm()):.6g} on rank 0 and "
                f"{float(gradients[at].norm()):.6g} on rank {rank}",
                "let every rank compute the same, also what has no gradient",
            )
    return Cause(
        "number of ranks",
        "the loss is right and its gradient is not: something in the backward pass (a "
        "hook, a function of one's own) multiplies, divides or adds up over the ranks, and the "
        "strategies have averaged over them already",
        f"on the same batch all ranks have the same gradient of {place.name!r}, and one "
        "device has another",
        "leave the number of ranks and collective calls out of the backward pass",
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
            "sum",
            "the gradient is a sum over samples: " + AVERAGES,
            f"on one device alone the gradient of {place.name!r} of the whole batch is "
            "the sum of those of its parts",
            MEAN_ADVICE,
        )
    return Cause(
        "batch dependent",
        "the gradient is no mean over samples: what backward gives a "
        "sample depends on the other samples of its batch (a loss divided by its own value, a "
        "gradient that a hook or a function normalises or clips), and each rank has its own batch",
        f"on one device alone the gradient of {place.name!r} of the whole batch is not "
        "the mean of those of its parts",
        "divide by what is averaged over the ranks: "
        "self.trainer.strategy.reduce(value, reduce_op='mean')",
    )


# Experiments on what a step leaves: buffers, weights, options of optimizers, gradients' scale.


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
            named,
            f"{what} is computed from what only this rank knows",
            f"{evidence}; with the same samples on all ranks they are equal",
            "compute it from numbers that are equal on all ranks: "
            "self.trainer.strategy.reduce(value, reduce_op='mean')",
        )
    return Cause(
        named,
        f"{what} depends on the rank or on the number of ranks",
        f"{evidence}, with the same samples on all ranks as well",
        "leave trainer.world_size and the rank out of it. Scaling with the samples of a "
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
        "buffer of own samples",
        f"the {what} {place.name!r} is written in the step from the samples of the rank, "
        "and rank 0's values are kept",
        "with the same samples on all ranks it is one device's",
        "average what is written over the ranks first: "
        "self.trainer.strategy.reduce(value, reduce_op='mean')",
    )


def _shared_memory(lab: Laboratory) -> Cause | None:
    name = lab.first.place.name
    for one, two in shared_storages(lab.subject.module):
        if name in (one, two) or name.endswith((f" of {one}", f" of {two}")):
            other = two if name == one else one
            return Cause(
                "shared memory",
                f"{one!r} and {two!r} are two parameters in the same memory (assigned by "
                f".data), so that on one device an update of {other!r} changes {name!r} as well; "
                "the strategies give each parameter memory of its own",
                "their storages begin at the same address",
                f"tie them as one parameter: {two} = {one}, without .data",
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
        "full matrices",
        "the optimizer's update of an element depends on other elements of its parameter, "
        "and the strategy gives it shards",
        "the gradients are one device's; under shard_ddp, which keeps parameters full, so "
        "are the weights",
        "use strategy='shard_ddp', or an element-wise optimizer such as AdamW",
    )


def accumulated_multiple(
    alone: Records, whole: Records, tolerance: float
) -> tuple[Place, Tensor, Tensor, float] | None:
    """Return where accumulated gradients are a multiple of one large batch's, and of what."""
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


# Experiments with seeds: what draws random numbers, of which each rank has its own.

_COUNTING = (int, float, list, dict, set, Tensor, itertools.count)


def cause_in_random_numbers(lab: Laboratory) -> Cause | None:
    """Return what draws random numbers; None if one device is itself with another seed."""
    tried = lab.subject, lab.joined, lab.tolerance
    moved = first_random(*tried)
    if moved is None:
        return None
    if (shared := cause_in_shared_values(*tried)) is not None:
        return shared
    names = changes.dropouts_of(lab.subject.module)
    advice = (
        "it is no mistake: ranks draw for different samples, and so do steps. To compare the rest, "
        "prove with dropout off (dropout=False, --no-dropout)"
    )
    called = f"dropout that {moved} calls as a function, or something like it"
    tried_without = [(changes.still, called, "when the modules are in evaluation mode")]
    if names:
        tried_without.insert(0, (changes.without_dropout, f"dropout in {_some(names)}", "with p=0"))
    for change, who, when in tried_without:
        if first_random(*tried, change) is None:
            return Cause(
                "dropout",
                f"{who}: each rank drops other elements than one device does",
                "one device differs from itself with another seed, and does not "
                + when
                + _rest(lab, change),
                advice,
            )
    return Cause(
        "random numbers",
        f"{moved} draws random numbers, other ones on each rank",
        "one device differs from itself with another seed, in evaluation mode as well",
        "it is no mistake if each sample gets numbers of its own; what all samples share "
        "(a mask of layers, a permutation) has to be drawn alike on all ranks: from a "
        "torch.Generator that is seeded with the number of the step",
    )


def _rest(lab: Laboratory, change: changes.Change) -> str:
    return "; nothing else differs" if lab.vanishes(change) else "; something else differs, too"


def cause_in_shared_values(
    subject: Subject, batches: Sequence[Any], tolerance: float
) -> Cause | None:
    """Return which of its classes' or files' values a run leaves to the next one; None for none."""
    before = _shared_values(subject.module)
    moved = first_random(subject, batches, tolerance, seeds=(0, 0))
    changed = [n for n, value in _shared_values(subject.module).items() if before.get(n) != value]
    if moved is None or not changed:
        return None
    return Cause(
        "shared attribute",
        f"{' and '.join(changed[:3])} belongs to a class or a file, and not to the module: "
        "ranks that are threads of one process share it, and each changes it for the others",
        "one device differs from itself with the same seed, and this value has changed",
        "ranks that are processes have one each, and may train as one device does. To prove "
        "the rest, keep it in the module: self.name = ... in __init__",
    )


def _shared_values(module: nn.Module) -> dict[str, str]:
    """Return in text what its classes have as attributes, and its file as globals."""
    kinds = {kind for one in module.modules() for kind in type(one).__mro__}
    owners: dict[str, Mapping[str, Any]] = {kind.__qualname__: vars(kind) for kind in kinds}
    owners["its file"] = vars(sys.modules[type(module).__module__])
    return {
        f"{owner}.{name}": repr(value)
        for owner, values in owners.items()
        for name, value in list(values.items())
        if isinstance(value, _COUNTING)
    }


def first_random(
    subject: Subject,
    batches: Sequence[Any],
    tolerance: float,
    change: changes.Change | None = None,
    seeds: tuple[int, int] = (0, 1),
) -> str | None:
    """Return what differs first between two seeds on one device, in words; None for nothing."""
    one, two = (
        subject.on_one_device(batches, change=change, seed=subject.seed + more) for more in seeds
    )
    first = compare(two, one, tolerance)
    if not first.differences:
        return None
    place = first.differences[0].place
    return f"the forward of {place.name!r}" if place.kind == "output" else "the step"


# Experiments on a loss: does the whole batch's follow from those of its parts, and from whose?
#
# L(1), L(2)      one device on each rank's batch      R(1), R(2)   the ranks themselves
# L(12)           one device on both
#
# R(1) is not L(1)                       ranks compute something else than one device
# L(12) is not (L(1) + L(2)) / 2         the loss is no mean over samples:
#     L(111) - L(11) = L(11) - L(1)      ... but a sum, at least in part
#     L(112) as weights w1, w2 have it   ... but a mean of unequal counts
#     neither                            ... a sample's loss depends on the other samples

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
            return _loss_otherwise_on_ranks(lab)
    if len(own) > 1 and not lab.same(torch.stack(own).mean(), whole):
        return _loss_no_mean(lab, own, whole)
    return None


def _kept(lab: Laboratory, evidence: str) -> Cause:
    names = _written(lab)
    return Cause(
        "buffer of own samples" if names else "kept from own samples",
        "the loss depends on something that the module keeps from batch to batch and that "
        "each rank takes from its own samples (a buffer, a frozen parameter, a number of samples, "
        "an attribute)",
        evidence + names,
        "keep what all ranks have together: self.trainer.strategy.reduce(value, "
        "reduce_op='mean'), reduce_op='sum' for counts",
    )


def _loss_no_mean(lab: Laboratory, own: list[Tensor], whole: Tensor) -> Cause:
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
            "sum",
            "the loss is a sum over samples, or has a part that is: " + AVERAGES,
            f"{seen}; with each sample twice it grows from {float(alone):.6g} to "
            f"{float(twice):.6g}, and by as much with each sample three times",
            MEAN_ADVICE,
        )
    if lab.same(twice, alone, scale) and _is_weighted(lab, one, two, own):
        return Cause(
            "unequal counts",
            "the loss is an average in which ranks count differently (ignored targets, "
            "padding, weights of classes): a mean of means is not the mean of all. " + AVERAGES,
            f"{seen}; with each sample twice it stays, and the weights of the parts that "
            "this needs foretell the loss with one part twice",
            "divide the sum by the mean count of all ranks: "
            "count = self.trainer.strategy.reduce(count, reduce_op='mean')",
        )
    return Cause(
        "batch dependent",
        "the loss of a sample depends on the other samples of its batch (a contrastive "
        "loss, a statistic of the batch, the hardest samples), and each rank has its own batch",
        f"{seen}; with each sample twice it is {float(twice):.6g}, and no weights of the "
        f"parts foretell the loss with one part twice{_written(lab)}",
        "gather what the loss compares over all ranks: self.all_gather(features, "
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
    return f"; from its samples the step writes {_some(names)}" if names else ""


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


def _loss_otherwise_on_ranks(lab: Laboratory) -> Cause | None:
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
                "rank dependent",
                f"the step depends on the rank: rank {other.rank} computes something else "
                f"than rank {first.rank}{_first_output_apart(lab, first, other)}",
                f"on the same batch, with the same weights, rank {first.rank} has the "
                f"loss {float(losses[0]):.6g} and rank {other.rank} {float(loss):.6g}",
                "let every rank compute the same; what only one has to do (printing, "
                "saving) must not change the loss",
            )
    if lab.same(losses[0], expected):
        return None
    return _number_of_ranks(lab, losses[0], expected)


def _first_output_apart(lab: Laboratory, first: Record, other: Record) -> str:
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
                "number of ranks",
                f"the loss is {how} by the number of ranks, which the strategies have "
                "averaged over already",
                evidence,
                "leave the number of ranks out of the loss",
            )
    term = (got - expected) / (number - 1)
    more = _with_another_rank(lab)
    is_linear = more is not None and lab.same(more - got, term, float(expected.abs()))
    seen = f"; with {number + 1} ranks {float(more):.6g}" if more is not None else ""
    called = f"; self.all_gather is called {gathers} times" if gathers else ""
    if is_linear:
        return Cause(
            "counted once per rank",
            f"a term of the loss, {float(term):.6g}, is counted once for each rank",
            f"{evidence}{seen}: it grows by this term with each rank{called}",
            "what all ranks have alike (a penalty on weights) belongs into the loss once, "
            "without a gather or a sum over ranks",
        )
    return Cause(
        "number of ranks",
        "the loss depends on the number of ranks",
        f"{evidence}{seen}{called}",
        "look for collective calls and trainer.world_size in the step",
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


_EXPERIMENTS: tuple[Experiment, ...] = (
    _divergence,
    cause_in_random_numbers,
    _batch_norm,
    cause_in_loss,
    _gathers,
    _parameter_hooks,
    _backward_hooks,
    _module_hooks,
    _callbacks,
    _group_option,
    _buffer,
    _shared_memory,
    _matrices,
    cause_in_gradient,
)
