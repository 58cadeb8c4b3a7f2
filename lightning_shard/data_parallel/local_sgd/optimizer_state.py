"""The ranks' optimizer states in a checkpoint: their mean, and each rank's own by name."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.local_sgd.packing import mean_over_ranks

_StateKey = tuple[int, str]  # the parameter's number and the key of its state


@contextmanager
def averaged_state(optimizer: Optimizer, collectives: Collectives) -> Iterator[None]:
    """Let an optimizer hold the mean of the ranks' states inside; each rank must enter.

    A parameter that some ranks have never used has state on the others only: the mean is over the
    others. Counters stay each rank's own.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state, nothing = optimizer.state, [param for param in params if param not in optimizer.state]
    means = _means(params, optimizer, collectives)
    own = {(index, key): state.get(params[index], {}).get(key) for index, key in means}
    for (index, key), mean in means.items():
        state.setdefault(params[index], {})[key] = mean
    try:
        yield
    finally:
        for (index, key), mean in means.items():
            entries, value = state[params[index]], own[index, key]
            if entries.get(key) is mean:  # else a method of the optimizer has put something there
                entries.pop(key) if value is None else entries.update({key: value})
        for param in nothing:
            if not state.get(param, True):
                del state[param]


def state_by_name(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str]
) -> dict[str, dict[str, Any]]:
    """Return an optimizer's state on this rank, by parameter name; nothing is copied."""
    return {
        names[param]: dict(optimizer.state[param])
        for group in optimizer.param_groups
        for param in group["params"]
        if param in optimizer.state and param in names  # not what a module has lost in mid-run
    }


def with_state_by_name(
    packed: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]],
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
) -> dict[str, Any]:
    """Return a `state_dict` with this rank's own state in the place of the mean.

    Args:
        packed: The `state_dict` of a checkpoint.
        own: What `state_by_name` has returned on this rank.
        optimizer: The optimizer, whose parameters are in the same order.
        names: Names of the parameters.
    """
    if "state" not in packed:  # there is no optimizer, or it has a form of its own
        return dict(packed)
    groups = packed["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = {
        number: dict(own[names[param]])
        for number, param in zip(numbers, params, strict=True)
        if names.get(param) in own
    }
    others = {key: one for key, one in packed["state"].items() if key not in numbers}
    return {**packed, "state": {**others, **state}}


def _means(
    params: list[nn.Parameter], optimizer: Optimizer, collectives: Collectives
) -> dict[_StateKey, Tensor]:
    mine = {
        (index, key): value
        for index, param in enumerate(params)
        for key, value in optimizer.state.get(param, {}).items()
        if _belongs_to_elements(key, value, param)
    }
    kinds = {place: (tuple(value.shape), value.dtype) for place, value in mine.items()}
    on_ranks = collectives.all_gather_object(kinds)
    means: dict[_StateKey, Tensor] = {}
    for place in sorted(set().union(*on_ranks)):
        having = [kinds[place] for kinds in on_ranks if place in kinds]
        shape, dtype = having[0]
        value = mine.get(place)
        if value is None:
            value = torch.zeros(shape, dtype=dtype, device=params[place[0]].device)
        (mean,) = mean_over_ranks([value], collectives)
        means[place] = (mean * (len(on_ranks) / len(having))).to(dtype)
    return means


def _belongs_to_elements(key: str, value: Any, param: nn.Parameter) -> bool:
    """Whether a state entry has a value per element, in contrast to a counter."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    return value.ndim > 0 or (param.ndim == 0 and key != "step")
