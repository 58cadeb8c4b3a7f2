"""Experiments with seeds: what draws random numbers, of which each rank has its own."""

import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_shard.proving import changes
from lightning_shard.proving.comparison import compare
from lightning_shard.proving.laboratory import Laboratory
from lightning_shard.proving.runs import Subject
from lightning_shard.proving.verdict import Cause

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
    told = ", ".join(map(repr, names[:3])) + (" and others" if len(names) > 3 else "")
    advice = (
        "it is no mistake: ranks draw for different samples, and so do steps. To compare the rest, "
        "prove with dropout off (dropout=False, --no-dropout)"
    )
    if names and first_random(*tried, changes.without_dropout) is None:
        return Cause(
            name="dropout",
            because=f"dropout in {told}: each rank drops other elements than one device does",
            evidence="one device differs from itself with another seed, and does not with p=0"
            + _rest(lab, changes.without_dropout),
            advice=advice,
        )
    if first_random(*tried, changes.still) is None:
        return Cause(
            name="dropout",
            because=f"dropout that {moved} calls as a function, or something like it: each rank "
            "drops other elements than one device does",
            evidence="one device differs from itself with another seed, and does not when the "
            "modules are in evaluation mode" + _rest(lab, changes.still),
            advice=advice,
        )
    return Cause(
        name="random numbers",
        because=f"{moved} draws random numbers, other ones on each rank",
        evidence="one device differs from itself with another seed, in evaluation mode as well",
        advice="it is no mistake if each sample gets numbers of its own; what all samples share "
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
        name="shared attribute",
        because=f"{' and '.join(changed[:3])} belongs to a class or a file, and not to the module: "
        "ranks that are threads of one process share it, and each changes it for the others",
        evidence="one device differs from itself with the same seed, and this value has changed",
        advice="ranks that are processes have one each, and may train as one device does. To prove "
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
