"""Ranks that train by themselves: each is one device on its own samples, until they meet.

    rank 0   step step step        one device on rank 0's samples   step step step
    rank 1   step step step        one device on rank 1's samples   step step step

Local SGD averages weights between such stretches, which asks nothing of the module.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_shard.errors import ShardError
from lightning_shard.tools.proving.batches import num_repeats, repeated, samples_of
from lightning_shard.tools.proving.causes import cause_in_shared_values, first_random
from lightning_shard.tools.proving.comparison import Comparison, Difference
from lightning_shard.tools.proving.records import Kind, Place, Record, Run
from lightning_shard.tools.proving.rounding import compared
from lightning_shard.tools.proving.runs import EXACT, RunFailedError, Subject
from lightning_shard.tools.proving.verdict import Cause, Verdict


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """One rank beside one device."""

    batches: Sequence[Any]
    found: Comparison
    tolerance: float

    @property
    def first(self) -> Difference | None:
        """What differs first, but for what is logged, which is each rank's own."""
        return self.found.first


def compared_alone(subject: Subject, verdict: Verdict) -> Verdict:
    """Compare each rank with one device on its own samples.

    Args:
        subject: What is proved, under a strategy whose ranks never meet.
        verdict: The verdict to complete.
    """
    run = subject.on_ranks()
    steps = 1 + max(place.step for place in run.records[0].values)
    verdict = replace(verdict, num_steps=steps, precision=subject.precision)
    wrong = wrong_data(subject, run)
    if wrong is not None:
        return replace(verdict, outcome="different", first=wrong[0], cause=wrong[1])
    decided, ranks = subject, _ranks(subject, run)
    before = _first_of(ranks)
    remarks = tuple[str, ...]()
    if before is not None and subject.precision != EXACT:
        try:
            decided = replace(subject, precision=EXACT)
            ranks = _ranks(decided, decided.on_ranks())
        except (RunFailedError, ShardError) as error:
            decided = subject
            remarks = (f"float64 could not decide whether this is rounding: {error}",)
    first = _first_of(ranks)
    verdict = replace(
        verdict,
        precision=decided.precision,
        deviations=_largest(ranks),
        remarks=remarks,
        is_rounding=first is None and before is not None,
    )
    if first is None:
        return verdict
    rank = next(one for one in ranks if one.first is first)
    return replace(verdict, outcome="different", first=first, cause=_cause(decided, rank))


def _ranks(subject: Subject, run: Run) -> list[_Rank]:
    made = list[_Rank]()
    for record, batches in zip(run.records, run.batches, strict=True):
        own = _before_the_end(replace(record, data_rank=0, num_data_ranks=1))
        alone = _before_the_end(subject.on_one_device(batches).records[0])
        found, tolerance = compared(subject, own, alone)
        made.append(_Rank(batches=batches, found=found, tolerance=tolerance))
    return made


def _before_the_end(record: Record) -> Run:
    """Return a run without what it leaves when it ends: there the ranks meet after all."""
    last = max(place.step for place in record.values)
    values = {
        place: one
        for place, one in record.values.items()
        if place.phase != "log" and (place.step, place.phase) != (last, "hooks after the update")
    }
    return Run(records=[replace(record, values=values)])


def _first_of(ranks: Sequence[_Rank]) -> Difference | None:
    found = [one.first for one in ranks if one.first is not None]
    return min(found, key=lambda one: one.place.step, default=None)


def _largest(ranks: Sequence[_Rank]) -> dict[Kind, float]:
    largest: dict[Kind, float] = {}
    for one in ranks:
        for kind, value in one.found.deviations.items():
            largest[kind] = max(largest.get(kind, 0.0), value)
    return largest


def _cause(subject: Subject, rank: _Rank) -> Cause:
    moved = first_random(subject, rank.batches, rank.tolerance)
    if moved is not None:
        shared = cause_in_shared_values(subject, rank.batches, rank.tolerance)
        return shared or Cause(
            name="random numbers",
            because=f"{moved} draws random numbers, other ones on each rank",
            evidence="one device differs from itself with another seed",
            advice="it is no mistake if each sample gets numbers of its own; to compare the rest, "
            "prove with dropout off (dropout=False, --no-dropout)",
        )
    return Cause(
        name="rank dependent",
        because="the step uses its rank, the number of ranks or what other ranks have, while each "
        "trains by itself",
        evidence="with the same samples and the same weights one device computes something else",
        advice="leave ranks and collective calls out of the step: between two exchanges nobody "
        "else takes it",
    )


# Whether each sample comes to one rank, as one device's loader gives it once.


def wrong_data(subject: Subject, ranks: Run) -> tuple[Difference, Cause] | None:
    """Return samples that come to several ranks, where one device's loader gives them once."""
    batches = ranks.batches
    if len(batches) < 2:
        return None
    found = repeated(batches)
    if found is None:
        return None
    first, other, number = found
    if _is_a_loaders(subject, ranks):
        return None
    alike = samples_of(batches[first][number]) == samples_of(batches[other][number])
    ours, theirs = (torch.tensor(float(one)) for one in (first, other))
    records = ranks.by_data_rank[other]
    place = Place(number // subject.accumulate, 0, "data", "batch", "samples")
    difference = Difference(
        place=place, rank=records[0].rank, got=theirs, expected=ours, deviation=float("inf")
    )
    how = "every rank is given the same samples" if alike else "ranks draw samples in orders of "
    because = how if alike else how + "their own, and some come to several ranks"
    return difference, Cause(
        name="same samples" if alike else "repeated samples",
        because=because,
        evidence=f"a sample of rank {first} came to rank {other} in its batch {number}; one "
        "device's loader gives each sample once",
        advice="let the Trainer assign the samples (use_distributed_sampler=True), or give your "
        "own sampler the same seed on all ranks, and num_replicas and rank from "
        "trainer.distributed_sampler_kwargs",
    )


def _is_a_loaders(subject: Subject, ranks: Run) -> bool:
    """Whether a loader repeats so: one device's own, or a sampler that gives ranks as many each.

    A sampler repeats fewer samples than there are ranks, at the end of all that there are.
    """
    number = subject.num_steps * len(ranks.batches)
    alone = replace(subject, num_steps=number).on_one_device(None).records[0].batches
    given = [one for of_rank in ranks.batches for batch in of_rank for one in samples_of(batch)]
    all_samples = {one for batch in alone for one in samples_of(batch)}
    is_padding = len(given) - len(ranks.batches) < len(set(given))
    return num_repeats(alone) > 0 or (is_padding and set(given) == all_samples)
