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
