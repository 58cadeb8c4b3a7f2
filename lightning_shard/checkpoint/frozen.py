"""Checkpoints without frozen parameters: of an adapter, for example, whose base stays as it is.

    checkpoint["lightning_shard"]["left_out"] = ["base.weight", ...]

A run that loads such a checkpoint keeps its own values of these names, and misses only others.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_shard.checkpoint.section import CHECKPOINT_KEY, writable_section

_KEY = "left_out"


def leave_out_frozen(checkpoint: dict[str, Any], module: nn.Module) -> None:
    """Take the frozen parameters out of a checkpoint that is about to be saved; buffers stay.

    Args:
        checkpoint: The dictionary that Lightning saves.
        module: The module, with the same parameters on every rank.
    """
    named = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, param in named if not param.requires_grad}
    state = checkpoint["state_dict"]
    left_out = [name for name in state if name in frozen]
    for name in left_out:  # in place: torch's own mapping knows module versions
        del state[name]
    if left_out:
        writable_section(checkpoint)[_KEY] = left_out


def left_out_of(checkpoint: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the parameters that a checkpoint was saved without."""
    return frozenset((checkpoint.get(CHECKPOINT_KEY) or {}).get(_KEY, ()))
