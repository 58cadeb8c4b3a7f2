"""Compares ranks with one device, value by value, in the order of the run.

A value of the ranks is made comparable first: outputs of the ranks' samples are put one after the
other, losses and other numbers are averaged over the ranks of different samples, everything else is
taken from the first rank. The deviation of a tensor is its largest absolute one, relative to the
tensor's largest element, or to a thousandth of others of its kind.

Rounding is measured: how far one device is from itself where only the order of sums differs.

    samples of a batch   0 1 2 3 4 5 6 7      sums are added up in one order
    reversed             7 6 5 4 3 2 1 0      and in others, which ranks do as well
    rotated              3 4 5 6 7 0 1 2
    in parts             0 1 2 3 | 4 5 6 7    gradients accumulate, as those of ranks are averaged

A step that computes a part in float32 (a loss of Hugging Face's models does) rounds in float64 as
well, and in half precision no fixed bound tells rounding from a mistake.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import Tensor

from lightning_shard.core.comparing import apart, largest
from lightning_shard.errors import ShardError
from lightning_shard.tools.proving.records import Kind, Phase, Place, Record, Records, option_of
from lightning_shard.tools.proving.runs import EXACT, RunFailedError, Subject, reordered

_PHASES = get_args(Phase)
_FLOOR = 1e-3
_NOTHING = 1e-8  # of values that are zero but for rounding
_TOLERANCES = {"64-true": 1e-9, "32-true": 2e-5, "32": 2e-5, "64": 1e-9}
_LOW_PRECISION = 2e-2


def tolerance_of(precision: str) -> float:
    """Return the largest relative deviation that rounding explains in a precision."""
    return _TOLERANCES.get(precision, _LOW_PRECISION)


def is_low_precision(precision: str) -> bool:
    """Whether a precision computes in half precision, in which no fixed bound tells rounding."""
    return precision not in _TOLERANCES


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One value that differs.

    Attributes:
        place: Where in the run.
        rank: Global rank whose value it is; None where it is all ranks' together.
        got: The ranks' value.
        expected: One device's value.
        deviation: Largest deviation, relative to the tensor's largest element.
    """

    place: Place
    rank: int | None
    got: Tensor
    expected: Tensor
    deviation: float

    @property
    def worst(self) -> tuple[float, float, tuple[int, ...]]:
        """The element that deviates most: got, expected, and its index."""
        if self.got.shape != self.expected.shape or self.got.numel() == 0:
            return math.nan, math.nan, ()
        apart = (self.got.double() - self.expected.double()).abs().nan_to_num(math.inf)
        at = int(apart.argmax())
        index = tuple(int(one) for one in torch.unravel_index(torch.tensor(at), apart.shape))
        got, expected = (float(one.reshape(-1)[at]) for one in (self.got, self.expected))
        return got, expected, index


@dataclass(kw_only=True)
class Comparison:
    """Ranks beside one device, and what deviates by more than the tolerance, in order."""

    deviations: dict[Kind, float] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    @property
    def counting(self) -> list[Difference]:
        """Differences of what is trained; outputs alone say nothing, they are only a trace."""
        return [one for one in self.differences if one.place.kind != "output"]

    @property
    def first(self) -> Difference | None:
        """The first difference; the output that leads to it, if one does."""
        if not (counting := self.counting):
            return None
        step, phase = counting[0].place.step, _PHASES.index(counting[0].place.phase)
        leading = [
            one
            for one in self.differences
            if one.place.kind == "output"
            and (one.place.step, _PHASES.index(one.place.phase)) <= (step, phase)
        ]
        return (leading or counting)[0]


def compare(ranks: Records, alone: Records, tolerance: float) -> Comparison:
    """Compare a run on ranks with one on one device."""
    found = Comparison()
    expected = alone.records[0].values
    scales = _scales(expected)
    for place in sorted(expected, key=in_order):  # stable: within a phase as it happened
        scale = scales.get(_alike(place), 0.0)
        for rank, got, want in pairs(ranks, place, expected[place]):
            apart = deviation(got, want, scale)
            if place.kind != "output":
                found.deviations[place.kind] = max(found.deviations.get(place.kind, 0.0), apart)
            if apart > tolerance:
                found.differences.append(
                    Difference(place=place, rank=rank, got=got, expected=want, deviation=apart)
                )
    found.differences += _unexpected(ranks, expected)
    return found


def deviation(got: Tensor, expected: Tensor, scale: float = 0.0) -> float:
    """Return the largest deviation, relative to the largest element or a part of `scale`."""
    return apart(got, expected) / max(largest([expected]), _FLOOR * scale, _NOTHING)


def in_order(place: Place) -> tuple[int, int, int, int]:
    """Return a key that sorts places as a run comes to them."""
    if place.phase == "log":  # once, at the end
        return (1 << 30, 0, 0, 0)
    is_option = option_of(place) is not None
    kinds: dict[str, int] = {"buffer": 0, "weight": 2, "optimizer state": 1 if is_option else 3}
    # the forwards and losses of a step's batches come before its gradients
    return (place.step, _PHASES.index(place.phase), place.micro, kinds.get(place.kind, 0))


def _alike(place: Place) -> tuple[str, str, str]:
    """Return what values of like size have in common: kind, phase, and of some a part of a name."""
    by_kind = {
        "buffer": place.name.rpartition(".")[2],
        "optimizer state": place.name.partition(" of ")[0],
    }
    return place.kind, place.phase, by_kind.get(place.kind, "")


def _scales(values: dict[Place, list[Tensor]]) -> dict[tuple[str, str, str], float]:
    scales: dict[tuple[str, str, str], float] = {}
    for place, tensors in values.items():
        if place.kind not in ("gradient", "weight", "buffer", "optimizer state"):
            continue
        for one in tensors:
            key = _alike(place)
            scales[key] = max(scales.get(key, 0.0), largest([one]))
    return scales


def norm_of_deviation(ranks: Records, alone: Records, kind: Kind) -> float:
    """Return how far all values of a kind together are off, as norms: the rest over the value."""
    apart, size = 0.0, 0.0
    for place, expected in alone.records[0].values.items():
        for _, got, want in pairs(ranks, place, expected) if place.kind == kind else ():
            if got.shape == want.shape:
                apart += float((got.double() - want.double()).square().sum())
                size += float(want.double().square().sum())
    return math.sqrt(apart / size) if size else 0.0


def pairs(
    ranks: Records, place: Place, expected: Sequence[Tensor]
) -> Iterator[tuple[int | None, Tensor, Tensor]]:
    """Yield what can be compared: a rank, or None for all, what it got, and what is expected."""
    if place.kind == "output":
        yield from _outputs(ranks, place, expected)
    elif place.kind in ("loss", "metric") or option_of(place):
        yield from _numbers(ranks, place, expected[-1])
    else:
        first = ranks.records[0]
        got = first.values.get(place)
        for one, want in zip(got or [], expected, strict=False):
            yield first.rank, one, want
        if got is None and any(bool(one.any()) for one in expected):
            yield first.rank, torch.zeros_like(expected[0]), expected[0]


def _numbers(
    ranks: Records, place: Place, expected: Tensor
) -> Iterator[tuple[int | None, Tensor, Tensor]]:
    """Losses are averaged over the ranks; a metric and an optimizer's option is each rank's own."""
    found = [records[0] for records in ranks.by_data_rank if place in records[0].values]
    if place.kind == "loss":
        if found:
            values = torch.stack([one.values[place][-1].double() for one in found])
            yield None, values.mean(0), expected.double()
        return
    for one in found:
        yield one.rank, one.values[place][-1], expected


def _outputs(
    ranks: Records, place: Place, expected: Sequence[Tensor]
) -> Iterator[tuple[int | None, Tensor, Tensor]]:
    of_ranks = [_called(records, place, len(expected)) for records in ranks.by_data_rank]
    for number, want in enumerate(expected):
        parts = [calls[number] for calls in of_ranks if len(calls) > number]
        if len(parts) < len(of_ranks):
            continue
        if want.ndim == 0:
            yield None, torch.stack([one.double() for one, _ in parts]).mean(0), want
            continue
        first = 0
        for got, record in parts:
            dim = _dim_of_samples([one for one, _ in parts], want)
            if dim is None:
                if got.shape == want.shape:
                    yield record.rank, got, want
                continue
            rows = want.narrow(dim, first, got.shape[dim])
            first += got.shape[dim]
            yield record.rank, got, rows


def _called(records: Sequence[Record], place: Place, num_calls: int) -> list[tuple[Tensor, Record]]:
    """Return a module's outputs on the ranks of one model, microbatches put together."""
    for record in records:
        outputs = record.values.get(place, [])
        if len(outputs) < num_calls or len(outputs) % num_calls:
            continue
        groups = [outputs[number::num_calls] for number in range(num_calls)]
        if len(outputs) == num_calls:
            return [(group[0], record) for group in groups]
        joined = list[tuple[Tensor, Record]]()
        for group in groups:
            if group[0].ndim == 0:
                joined.append((torch.stack(group).double().mean(0), record))
            elif len({one.shape[1:] for one in group}) == 1:
                joined.append((torch.cat(group), record))
        return joined
    return []


def _dim_of_samples(parts: Sequence[Tensor], want: Tensor) -> int | None:
    """Return the dimension along which the ranks' outputs make up one device's."""
    if any(one.ndim != want.ndim for one in parts):
        return None
    for dim in range(want.ndim):
        rest = [(*one.shape[:dim], *one.shape[dim + 1 :]) for one in (*parts, want)]
        adds_up = sum(one.shape[dim] for one in parts) == want.shape[dim]
        if adds_up and len(set(rest)) == 1:
            return dim
    return None


def _unexpected(ranks: Records, expected: dict[Place, list[Tensor]]) -> list[Difference]:
    """Gradients and metrics that only the ranks have."""
    return [
        Difference(
            place=place,
            rank=ranks.records[0].rank,
            got=values[0],
            expected=torch.zeros_like(values[0]),
            deviation=math.inf,
        )
        for place, values in ranks.records[0].values.items()
        if place.kind == "gradient" and place not in expected and bool(values[0].any())
    ]


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


def in_parts(subject: Subject, ranks: Records) -> Records:
    """Return one device that accumulates the ranks' batches, whose parts round as theirs do."""
    parts = ranks.batches
    count = subject.accumulate * len(parts)
    options = {**subject.options, "accumulate_grad_batches": count}
    given = [batch for of_ranks in zip(*parts, strict=True) for batch in of_ranks]
    record = replace(subject, options=options).on_one_device(given).records[0]
    return Records(records=[_with_whole_losses(record, len(parts))])


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


def deviations_in_low_precision(got: Records, alone: Records) -> dict[Kind, float]:
    """Return by kind the largest deviation; of what optimizers make, that of all together."""
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


def compared(subject: Subject, ranks: Records, alone: Records) -> tuple[Comparison, float]:
    """Compare a run with one device; return the deviation that rounding explains, too."""
    tolerance = tolerance_of(subject.precision)
    found = compare(ranks, alone, tolerance)
    if subject.precision == EXACT and found.first is not None:
        tolerance = _exact_tolerance(subject, alone, tolerance)
        found = compare(ranks, alone, tolerance)
    return found, tolerance


def _exact_tolerance(subject: Subject, alone: Records, tolerance: float) -> float:
    """Return the deviation that rounding explains in float64, where parts may be of float32."""
    noise = max(_deviation(subject, alone, order) for order in _ORDERS)
    least = _FLOAT32 if _has_float32(alone) else tolerance
    return min(max(_MARGIN * noise, least), _MOST)


def _deviation(subject: Subject, alone: Records, order: Callable[[int], list[int]]) -> float:
    """Return how far one device is from itself with the samples in another order."""
    given: list[Any] = [reordered(batch, order) for batch in alone.records[0].batches]
    try:
        moved = subject.on_one_device(given)
    except (RunFailedError, ShardError):  # the step may count on the order
        return 0.0
    found = compare(moved, alone, math.inf).deviations
    return max((value for kind, value in found.items() if kind != "metric"), default=0.0)


def _has_float32(alone: Records) -> bool:
    values = (one for tensors in alone.records[0].values.values() for one in tensors)
    return any(one.is_floating_point() and one.dtype != torch.float64 for one in values)
