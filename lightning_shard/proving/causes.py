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

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lightning_shard.errors import ShardError
from lightning_shard.proving import changes
from lightning_shard.proving.gradient_causes import cause_in_gradient
from lightning_shard.proving.laboratory import Laboratory
from lightning_shard.proving.loss_causes import cause_in_loss
from lightning_shard.proving.random_causes import cause_in_random_numbers
from lightning_shard.proving.records import RATE, Place, bare_name, option_of
from lightning_shard.proving.runs import RunFailedError
from lightning_shard.proving.update_causes import cause_in_update
from lightning_shard.proving.verdict import Cause, CauseName

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
        name="unknown",
        because="none of the experiments explains it",
        evidence="random numbers, batch norms, the loss of the batch's parts, equal batches on all "
        "ranks, hooks and callbacks were tried, each by itself",
        advice="look at the tensor that is named above, on that rank; "
        "strategy='shard_ddp' is the simplest case to compare with",
    )


def _divergence(lab: Laboratory) -> Cause | None:
    values, last = lab.alone.records[0].values.items(), lab.first.place.step
    losses = [float(of[-1]) for place, of in values if place.kind == "loss" and place.step <= last]
    if all(abs(one) <= _DIVERGED * max(1.0, abs(losses[0])) for one in losses):  # not so of NaN
        return None
    return Cause(
        name="divergence",
        because=f"the fit diverges, on one device too: its loss goes from {losses[0]:.3g} to "
        f"{losses[-1]:.3g}, and rounding grows with it",
        evidence="the losses of one device up to this step",
        advice="prove with a smaller learning rate, or with clipped gradients",
    )


def _batch_norm(lab: Laboratory) -> Cause | None:
    names = changes.batch_norms_of(lab.subject.module)
    if not names or not lab.vanishes(changes.with_fixed_statistics):
        return None
    told = ", ".join(map(repr, names[:3])) + (" and others" if len(names) > 3 else "")
    return Cause(
        name="batch norm",
        because=f"batch norm in {told}: each rank normalises by the statistics of its own samples",
        evidence="with fixed statistics the ranks and one device are equal",
        advice="pass Trainer(sync_batchnorm=True), or take a norm of single samples (GroupNorm, "
        "LayerNorm); with large batches on each rank it is often left as it is",
    )


def _edits(lab: Laboratory) -> Cause | None:
    """Hooks of parameters, of the module and of callbacks, each left out by itself."""
    for experiment in (_gathers, _parameter_hooks, _backward_hooks, _module_hooks, _callbacks):
        found = experiment(lab)
        if found is not None:
            return found
    return None


def _gathers(lab: Laboratory) -> Cause | None:
    gathers = lab.ranks.records[0].num_gathers
    if not gathers or not lab.vanishes(changes.with_gathered_gradients):
        return None
    return Cause(
        name="gather without gradients",
        because="self.all_gather(...) is called without sync_grads=True, so that what the other "
        "ranks have given gets no gradient",
        evidence=f"{gathers} calls; with sync_grads=True the ranks and one device are equal",
        advice="pass sync_grads=True",
    )


def _parameter_hooks(lab: Laboratory) -> Cause | None:
    names = changes.hooked_parameters(lab.subject.module)
    if not names or not lab.vanishes(changes.without_parameter_hooks):
        return None
    return Cause(
        name="parameter hook",
        because=f"the hook on {', '.join(map(repr, names[:3]))} edits the gradient of each rank's "
        "own samples, before it is averaged, by something that is no multiple of it",
        evidence="without parameters' hooks the ranks and one device are equal",
        advice="edit the averaged gradient, in on_before_optimizer_step",
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
            name=named,
            because=because + "it uses what only this rank knows, its loss or its samples",
            evidence=evidence + "; with the same samples on all ranks they are, too",
            advice="let all ranks compute from the same numbers: average them first, "
            "self.trainer.strategy.reduce(value, reduce_op='mean')",
        )
    return Cause(
        name=named,
        because=because + "it uses the rank, the number of ranks, or a collective call",
        evidence=evidence + "; with the same samples on all ranks they still differ",
        advice="leave ranks and sums over them out of it: the strategy has averaged the gradients "
        "already",
    )


def _callbacks(lab: Laboratory) -> Cause | None:
    callbacks = list(lab.subject.options.get("callbacks") or ())
    for at, one in enumerate(callbacks):
        options = changes.without_callback(at, lab.subject.options)
        if lab.vanishes(lambda _: None, subject=replace(lab.subject, options=options)):
            return _by_what(lab, "callback", f"the callback {type(one).__name__}", "without it")
    return None


_EXPERIMENTS: tuple[Experiment, ...] = (
    _divergence,
    cause_in_random_numbers,
    _batch_norm,
    cause_in_loss,
    _edits,
    cause_in_update,
    cause_in_gradient,
)


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
        name="unsynchronised log",
        because=f"{place.name!r} is logged with rank_zero_only=True, or for a group of ranks: each "
        "has the value of its own samples, and loggers get rank 0's",
        evidence=evidence,
        advice=advice,
    )


def _averaged_log(name: str, values: Tensor, expected: Tensor) -> Cause:
    return Cause(
        name="averaged log",
        because=f"{name!r} is brought together over the ranks, but what they have is not what one "
        "device makes of all samples: a function of a mean (an exponential, a root, a ratio), a "
        "sum, or a mean of unequal counts",
        evidence=f"it is logged for an epoch, with sync_dist=True or as a metric; rank 0 has "
        f"{float(values[0]):.6g}, one device {float(expected):.6g}",
        advice="log what is a mean over samples and compute the rest from it afterwards, or log a "
        "torchmetrics.Metric, which adds up what it needs over the ranks",
    )
