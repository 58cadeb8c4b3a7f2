"""An estimate of the bytes that an optimizer's state will take, before its first step.

An optimizer of the same class and options takes a step on a parameter of a few elements. What it
then keeps with as many elements grows with a parameter; what has one element does not. That is done
for torch's own optimizers only: the step of another might do more than to update.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_SIDE = 3  # of the trial's parameter


def expected_state_bytes(optimizer: Optimizer, shards: Mapping[nn.Parameter, Tensor]) -> int | None:
    """Return the bytes that an optimizer's state will take on this rank.

    Args:
        optimizer: The user's optimizer; it is not changed.
        shards: By parameter, the shard of it that this rank's optimizer updates; parameters that
            are missing here count nothing.

    Returns:
        Bytes on this rank; None where no trial can tell: a class that is not torch's, or state
            of other shapes.
    """
    total = 0.0
    trials: dict[tuple[int, int, torch.dtype], tuple[float, int] | None] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            shard = shards.get(param)
            if shard is None or shard.numel() == 0 or not param.requires_grad:
                continue
            key = number, shard.ndim, shard.dtype
            if key not in trials:
                trials[key] = _trial(optimizer, group, shard)
            found = trials[key]
            if found is None:
                return None
            total += found[0] * shard.numel() + found[1]
    return round(total)


def _trial(optimizer: Optimizer, group: dict[str, Any], like: Tensor) -> tuple[float, int] | None:
    """Return the bytes for each element, and those for the parameter whatever its size."""
    kind = type(optimizer)
    parameters = inspect.signature(kind.step).parameters
    needs_closure = "closure" in parameters and parameters["closure"].default is not None
    is_torchs = f"{kind.__module__}.".startswith("torch.optim.")  # Muon says "torch.optim"
    if not is_torchs or needs_closure:
        return None
    param = nn.Parameter(torch.zeros((_SIDE,) * like.ndim, dtype=like.dtype, device=like.device))
    param.grad = torch.zeros_like(param)
    try:
        made = _make_alike(kind, optimizer, group, param)
        made.step()
    except Exception:
        return None  # nothing but the announcement is lost
    each, full = 0.0, 0
    for value in made.state[param].values():
        if not isinstance(value, Tensor):
            continue
        if value.numel() == param.numel():
            each += value.itemsize
        elif value.numel() == 1:
            full += value.itemsize
        else:
            return None
    return each, full


def _make_alike(
    kind: Callable[..., Optimizer], optimizer: Optimizer, group: dict[str, Any], param: Tensor
) -> Optimizer:
    known = inspect.signature(kind).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    made = kind([param], **options)
    made.param_groups[0].update({name: group[name] for name in group if name != "params"})
    return made
