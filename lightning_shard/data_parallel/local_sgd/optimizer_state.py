"""The ranks' optimizer states in a checkpoint: their mean, and each rank's own by name."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.local_sgd.rules import mean_over_ranks
from lightning_shard.data_parallel.optimizer_entries import tensors_of

_StateKey = tuple[int, str]  # the parameter's number and the key of its state


@contextmanager
def averaged_state(optimizer: Optimizer, collectives: Collectives) -> Iterator[None]:
    """Let an optimizer hold the mean of the ranks' states inside; each rank must enter.

    The mean of a parameter is over the ranks that have state. Counters stay each rank's own, and so
    does a state in few bits.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own, shown = dict(optimizer.state), dict[nn.Parameter, dict[str, Any]]()
    for (index, key), mean in _means(params, optimizer, collectives).items():
        param = params[index]
        shown.setdefault(param, dict(own.get(param, {})))[key] = mean
    # dictionaries of their own: what is saved of them inside may be written after
    optimizer.state.update({param: dict(entries) for param, entries in shown.items()})
    try:
        yield
    finally:
        for param, entries in shown.items():
            _take_back(optimizer, param, entries, own.get(param))


def _take_back(
    optimizer: Optimizer, param: nn.Parameter, shown: dict[str, Any], own: dict[str, Any] | None
) -> None:
    """Give a parameter its rank's own state, but what a method of the optimizer has put there."""
    found = optimizer.state.get(param, {})
    put = {key: value for key, value in found.items() if shown.get(key) is not value}
    if own is None and not put:
        optimizer.state.pop(param, None)
    else:
        optimizer.state[param] = {} if own is None else own
        optimizer.state[param].update(put)


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
    """Return a checkpoint's `state_dict` with this rank's own state in the place of the mean.

    The own state is what `state_by_name` has returned; the parameters are in the same order.
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
        if _belongs_to_elements(key, value, param) and not _has_codes(optimizer.state[param])
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


def _has_codes(entries: Mapping[str, Any]) -> bool:
    """Whether a state lies in few bits, whose scales by themselves have no mean."""
    return any(not one.is_floating_point() and one.ndim for one in tensors_of(entries))


def _belongs_to_elements(key: str, value: Any, param: nn.Parameter) -> bool:
    """Whether a state entry has a value per element, in contrast to a counter."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    return value.ndim > 0 or (param.ndim == 0 and key != "step")
