"""Whether each sample comes to one rank, as one device's loader gives it once."""

from dataclasses import replace

import torch

from lightning_shard.proving.batches import num_repeats, repeated, samples_of
from lightning_shard.proving.comparison import Difference
from lightning_shard.proving.records import Place, Run
from lightning_shard.proving.runs import Subject
from lightning_shard.proving.verdict import Cause


def wrong_data(subject: Subject, ranks: Run) -> tuple[Difference, Cause] | None:
    """Return samples that come to several ranks, where one device's loader gives them once."""
    batches = ranks.batches
    if len(batches) < 2:
        return None
    found = repeated(batches)
    if found is None:
        return None
    first, other, number = found
    is_padding = number == len(batches[0]) - 1 and number > 0
    alike = samples_of(batches[first][number]) == samples_of(batches[other][number])
    if (is_padding and not alike) or _has_repeats(subject, ranks):
        return None
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


def _has_repeats(subject: Subject, ranks: Run) -> bool:
    """Whether one device's own loader gives a sample twice in as many batches."""
    number = subject.num_steps * len(ranks.batches)
    alone = replace(subject, num_steps=number).on_one_device(None)
    return num_repeats(alone.records[0].batches) > 0
