"""How far one device is from itself where only the order of sums differs: rounding, measured.

    samples of a batch   0 1 2 3 4 5 6 7      sums are added up in one order
    reversed             7 6 5 4 3 2 1 0      and in others, which ranks do as well
    rotated              3 4 5 6 7 0 1 2
    in parts             0 1 2 3 | 4 5 6 7    gradients accumulate, as those of ranks are averaged

A step that computes a part in float32 whatever its format is (a loss of Hugging Face's models does)
rounds in float64 as well, and in half precision no fixed bound tells rounding from a mistake.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_shard.errors import ShardError
from lightning_shard.tools.proving.batches import reordered
from lightning_shard.tools.proving.comparison import (
    Comparison,
    compare,
    norm_of_deviation,
    tolerance_of,
)
from lightning_shard.tools.proving.records import Kind, Place, Record, Run
from lightning_shard.tools.proving.runs import EXACT, RunFailedError, Subject

_MARGIN = 8.0  # ranks add up in orders of their own
_MOST = 2e-5  # no more than float32 is allowed
_FLOAT32 = 1e-6
_OF_A_STEP: tuple[Kind, ...] = ("loss", "gradient", "buffer")
_OF_AN_UPDATE: tuple[Kind, ...] = ("weight", "optimizer state")
_LEAST = {False: 2e-2, True: 1e-3}  # by whether all of an update is taken together
_ORDERS: tuple[Callable[[int], list[int]], ...] = (
    lambda number: list(reversed(range(number))),
    lambda number: [*range(number // 3 + 1, number), *range(number // 3 + 1)][:number],
)


def in_parts(subject: Subject, ranks: Run) -> Run:
    """Return one device that accumulates the gradients of the ranks' batches.

    What ranks compute in half precision of their own samples is rounded before it is averaged.
    """
    parts = ranks.batches
    count = subject.accumulate * len(parts)
    options = {**subject.options, "accumulate_grad_batches": count}
    given = [batch for of_ranks in zip(*parts, strict=True) for batch in of_ranks]
    record = replace(subject, options=options).on_one_device(given).records[0]
    return Run(records=[_with_whole_losses(record, len(parts))])


def _with_whole_losses(record: Record, num_parts: int) -> Record:
    """Return a record in which the losses of a batch's parts are one; each is divided already."""
    groups: dict[Place, list[Tensor]] = {}
    values = {place: one for place, one in record.values.items() if place.kind != "loss"}
    for place, losses in record.values.items():
        if place.kind == "loss":
            whole = place._replace(micro=place.micro // num_parts)
            groups.setdefault(whole, []).append(losses[-1].double())
    sums = {place: [torch.stack(losses).sum(0)] for place, losses in groups.items()}
    return replace(record, values=values | sums)


def deviations_in_low_precision(got: Run, alone: Run) -> dict[Kind, float]:
    """Return by kind the largest deviation; of what optimizers make, that of all together.

    An optimizer like Adam steps by its rate in a direction of noise where a gradient is nothing but
    rounding.
    """
    largest = compare(got, alone, math.inf).deviations
    found = {kind: value for kind, value in largest.items() if kind in _OF_A_STEP}
    return found | {kind: norm_of_deviation(got, alone, kind) for kind in _OF_AN_UPDATE}


def beyond_rounding(got: Mapping[Kind, float], noise: Mapping[Kind, float]) -> list[Kind]:
    """Return the kinds in which ranks deviate by more than rounding explains."""
    return [
        kind
        for kind, value in got.items()
        if value > max(_MARGIN * noise.get(kind, 0.0), _LEAST[kind in _OF_AN_UPDATE])
    ]


def compared(subject: Subject, ranks: Run, alone: Run) -> tuple[Comparison, float]:
    """Compare a run with one device; return the deviation that rounding explains, too."""
    tolerance = tolerance_of(subject.precision)
    found = compare(ranks, alone, tolerance)
    if subject.precision == EXACT and found.first is not None:
        tolerance = _exact_tolerance(subject, alone, tolerance)
        found = compare(ranks, alone, tolerance)
    return found, tolerance


def _exact_tolerance(subject: Subject, alone: Run, tolerance: float) -> float:
    """Return the deviation that rounding explains in float64, where parts may be of float32."""
    noise = max(_deviation(subject, alone, order) for order in _ORDERS)
    least = _FLOAT32 if _has_float32(alone) else tolerance
    return min(max(_MARGIN * noise, least), _MOST)


def _deviation(subject: Subject, alone: Run, order: Callable[[int], list[int]]) -> float:
    """Return how far one device is from itself with the samples in another order."""
    given: list[Any] = [reordered(batch, order) for batch in alone.records[0].batches]
    try:
        moved = subject.on_one_device(given)
    except (RunFailedError, ShardError):  # the step may count on the order
        return 0.0
    found = compare(moved, alone, math.inf).deviations
    return max((value for kind, value in found.items() if kind != "metric"), default=0.0)


def _has_float32(alone: Run) -> bool:
    values = (one for tensors in alone.records[0].values.values() for one in tensors)
    return any(one.is_floating_point() and one.dtype != torch.float64 for one in values)
