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
    frozen = _frozen_names(module)
    state = checkpoint["state_dict"]
    left_out = [name for name in state if name in frozen]
    for name in left_out:  # in place: torch's own mapping knows module versions
        del state[name]
    if left_out:
        writable_section(checkpoint)[_KEY] = left_out


def frozen_entries(module: nn.Module, state: Mapping[str, Any]) -> set[nn.Parameter]:
    """Return the parameters of which `leave_out_frozen` takes every entry out of a state.

    Args:
        module: The module, with the same parameters on every rank.
        state: Its `state_dict` with the parameters themselves.
    """
    frozen = _frozen_names(module)
    params = {value for value in state.values() if isinstance(value, nn.Parameter)}
    return params - {value for name, value in state.items() if name not in frozen}


def _frozen_names(module: nn.Module) -> set[str]:
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, param in named if not param.requires_grad}


def left_out_of(checkpoint: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the parameters that a checkpoint was saved without."""
    return frozenset((checkpoint.get(CHECKPOINT_KEY) or {}).get(_KEY, ()))
