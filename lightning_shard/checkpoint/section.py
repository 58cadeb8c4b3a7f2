"""The section of a checkpoint that only this package's strategies read, and its format number.

    checkpoint["lightning_shard"] = {"format": 3, "compression": ..., "rank_0": ..., "rank_1": ...}

A section without a number is of format 1: it has means of what ranks keep. Format 2 has what each
rank keeps, too, see `by_rank`. Format 3 has that alone: who needs a mean takes it when it loads.
The number changes when an older version of this package would misread what a newer one writes, or
go on from less than there is.

Frozen parameters may be left out, such as the base of an adapter; their names stand in the entry
"left_out". A run that loads such a checkpoint keeps its own values of them, and misses only others.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from torch import nn

from lightning_shard.data_parallel.memory.inner_tensors import composed_names
from lightning_shard.errors import CheckpointError

CHECKPOINT_KEY = "lightning_shard"
FORMAT = 3
_KEY = "left_out"


def writable_section(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the section of a checkpoint that is about to be saved, with its format's number."""
    section: dict[str, Any] = checkpoint.setdefault(CHECKPOINT_KEY, {})
    section["format"] = FORMAT
    return section


def section_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a checkpoint's section, empty where it has none; raise if it is too new."""
    section: Mapping[str, Any] = checkpoint.get(CHECKPOINT_KEY, {})
    number = section.get("format", 1)
    if not isinstance(number, int) or number > FORMAT:
        raise CheckpointError(
            f"This checkpoint's section {CHECKPOINT_KEY!r} has format {number!r}, expected at most "
            f"{FORMAT}: a newer lightning-shard has written it. Install that version or a "
            f"later one (pip install -U lightning-shard), or load the weights alone with "
            f"load_from_checkpoint."
        )
    return section


def leave_out_frozen(checkpoint: dict[str, Any], module: nn.Module) -> None:
    """Take frozen parameters, and what tells of one, out of a checkpoint that is being saved."""
    frozen = _frozen_names(module)
    state = checkpoint["state_dict"]
    stays = dict(module.named_buffers(remove_duplicate=False))
    left_out = [name for name in state if name not in stays and not frozen.isdisjoint(_path(name))]
    for name in left_out:  # in place: torch's own mapping knows module versions
        del state[name]
    if left_out:
        writable_section(checkpoint)[_KEY] = left_out


def frozen_entries(module: nn.Module, state: Mapping[str, Any]) -> set[nn.Parameter]:
    """Return the parameters of which `leave_out_frozen` takes every entry out of a state."""
    frozen = _frozen_names(module)
    params = {value for value in state.values() if isinstance(value, nn.Parameter)}
    return params - {value for name, value in state.items() if name not in frozen}


def _frozen_names(module: nn.Module) -> set[str]:
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, param in named if not param.requires_grad} | {*composed_names(module)}


def _path(name: str) -> list[str]:
    """Return a dotted name, those of what it is in, and what an entry may tell of."""
    told_of, _, what = name.rpartition("_")
    own = [told_of] if what == "format" else []
    return [*own, *accumulate(name.split("."), "{}.{}".format)]


def left_out_of(checkpoint: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the parameters that a checkpoint was saved without."""
    return frozenset((checkpoint.get(CHECKPOINT_KEY) or {}).get(_KEY, ()))
