"""The proof without tolerance: `same_bits=True` on ranks beside the same on one rank.

    one rank    micro-batches 0 1 2 3    outputs and gradients of each, then the step's
    two ranks   rank 0: 0 1  rank 1: 2 3    the same, compared with the one rank's by number

Every difference is a finding. What one micro-batch computes names the rank that has computed it;
what follows from all of them is the same on every rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_shard.strategies.micro_batches import number_in_step
from lightning_shard.tools.proving.comparison import Difference, deviation, in_order
from lightning_shard.tools.proving.records import Place, Records
from lightning_shard.tools.proving.runs import Recorder, Subject
from lightning_shard.tools.proving.strategies import strategy_in_process
from lightning_shard.tools.proving.verdict import Cause, Verdict

_OF_MICRO_BATCHES = ("forward", "micro-batch")


class MicroBatchRecorder(Recorder):
    """Records the gradients of each micro-batch, too."""

    _handles: Sequence[RemovableHandle] = ()

    @override
    def on_before_backward(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss: Tensor
    ) -> None:
        params: Any = pl_module.named_parameters()
        # Here the hooks of the step itself are there already, and are called before these.
        self._handles = [
            param.register_hook(partial(self._note_gradient, name))
            for name, param in params
            if param.requires_grad
        ]

    @override
    def on_after_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        for handle in self._handles:
            handle.remove()

    def _note_gradient(self, name: str, grad: Tensor) -> None:
        self._add("micro-batch", "gradient", name, grad)


def proved_to_the_bit(subject: Subject, verdict: Verdict) -> Verdict:
    """Compare a training on ranks with that on one rank, where both have the same bits."""
    made = strategy_in_process(subject.strategy, subject.num_ranks, same_bits=True)
    subject = replace(subject, strategy=made, recorder=MicroBatchRecorder)
    number = subject.accumulate * subject.num_ranks
    options = {**subject.options, "accumulate_grad_batches": number}
    ranks = subject.on_ranks()
    alone = replace(subject, num_ranks=1, options=options).on_ranks()
    places = partial(number_in_step, num_own=subject.accumulate, stage=made.run.options.stage)
    found = sorted(_differences(ranks, alone, places), key=lambda one: in_order(one.place))
    steps = 1 + max(place.step for place in alone.records[0].values)
    verdict = replace(verdict, num_steps=steps, precision=subject.precision)
    if not found:
        return verdict
    return replace(verdict, outcome="different", first=found[0], cause=_cause(found[0]))


def _differences(ranks: Records, alone: Records, number: Any) -> Iterator[Difference]:
    """Yield what has other bits; values that one run alone has count, too."""
    expected, num_ranks = dict(alone.records[0].values), len(ranks.records)
    for record in ranks.records:
        for place, values in record.values.items():
            own = place
            if place.phase in _OF_MICRO_BATCHES:
                own = place._replace(micro=number(record.rank, num_ranks, place.micro))
            elif record.rank or _is_told_otherwise(place):
                continue
            for got, want in zip(values, expected.get(own, []), strict=False):
                if not has_same_bits(got, want):
                    yield Difference(
                        place=own,
                        rank=record.rank if own.phase in _OF_MICRO_BATCHES else None,
                        got=got,
                        expected=want,
                        deviation=deviation(got, want),
                    )


def _is_told_otherwise(place: Place) -> bool:
    """Whether a value is divided by a rank's number of micro-batches, or of its samples alone."""
    return place.kind == "loss" or (place.kind == "metric" and place.name.endswith("_step"))


def has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same to the bit."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = (part.contiguous().reshape(-1).view(torch.uint8) for part in (one, other))
    return torch.equal(*bits)


def _cause(first: Difference) -> Cause:
    if first.rank is None:
        return Cause(
            name="unknown",
            because="what the ranks have computed of each micro-batch is the same, and what they "
            "make of all of them is not",
            evidence="same_bits=True on one rank has other bits",
            advice="look for a callback, a hook or an optimizer that adds up over shards or ranks",
        )
    return Cause(
        name="rank dependent",
        because=f"micro-batch {first.place.micro} of the step has other bits on rank {first.rank} "
        f"than on one rank, with the same samples, weights and random numbers",
        evidence="same_bits=True on one rank has other bits",
        advice="look for what uses the rank or the number of ranks, what was kept from earlier "
        "micro-batches, and random numbers from a generator of one's own",
    )
