"""An optimizer's state for each parameter, in a form from which another rank can rebuild it.

    optimizer.state[p] = {"step": tensor(7.), "exp_avg": shard, "exp_avg_sq": shard}
                             │                    └─────┬─────┘
    entries of p         Scalar(7.0)                 ShardMark      the elements themselves travel
                         the same on all ranks                      in a tensor entry of the
                         snapshot

Single numbers are kept as numbers: a model has hundreds of step counters, mostly equal ones.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.checkpoint.optimizer_state import is_on_other_ranks, is_shard, params_of
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters


class ShardMark(NamedTuple):
    """Marks a tensor with an element for each of the parameter's, cut where the parameter is."""

    dtype: torch.dtype


class Scalar(NamedTuple):
    """A tensor without dimensions, as a Python number, which holds each of torch's exactly.

    `on_device` says whether the tensor was on the parameter's device, not on the CPU.
    """

    value: Any
    dtype: torch.dtype
    on_device: bool


class CommonValue(NamedTuple):
    """Any other value that is the same on all ranks, a tensor in host memory."""

    value: Any
    on_device: bool


Entry = ShardMark | Scalar | CommonValue
Entries = tuple[tuple[str, Entry], ...]  # in the optimizer's own order


def describe(optimizer: Optimizer, engine: DataParallelEngine) -> list[Entries | None]:
    """Describe an optimizer's state for each of its parameters, in order; no communication.

    Parameters without state have None, and so have those of which all elements lie on other ranks,
    whose counters are stale here.
    """
    scalars = _scalars(optimizer, engine)
    known: dict[object, Entries] = {}  # equal ones are one object: they are pickled once
    described: list[Entries | None] = []
    for param in params_of(optimizer):
        state, home = optimizer.state.get(param), engine.owner(param)
        if not state or is_on_other_ranks(*home):
            described.append(None)
            continue
        entries = tuple((key, _entry(value, home, scalars)) for key, value in state.items())
        described.append(known.setdefault(_likeness(entries), entries))
    return described


def merge(described: Sequence[Sequence[Entries | None]]) -> list[Entries | None]:
    """Merge the ranks' descriptions of one optimizer's state."""
    return [
        next((entries for entries in of_param if entries is not None), None)
        for of_param in zip(*described, strict=True)
    ]


def rebuild(entry: Scalar | CommonValue, param: nn.Parameter) -> Any:
    """Return the described value, on the device where it was."""
    if isinstance(entry, Scalar):
        device = param.device if entry.on_device else torch.device("cpu")
        return torch.tensor(entry.value, dtype=entry.dtype, device=device)
    if isinstance(entry.value, Tensor):
        return entry.value.to(param.device) if entry.on_device else entry.value.clone()
    return entry.value


def _scalars(optimizer: Optimizer, engine: DataParallelEngine) -> dict[int, Scalar]:
    """Return the numbers in 0-dim tensors by id, read in one copy for each device and format."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for param in params_of(optimizer):
        if not is_on_other_ranks(*engine.owner(param)):
            for value in optimizer.state.get(param, {}).values():
                if isinstance(value, Tensor) and value.ndim == 0:
                    alike[value.device, value.dtype].append(value)
    return {
        id(tensor): Scalar(value, dtype, device.type != "cpu")
        for (device, dtype), tensors in alike.items()
        for tensor, value in zip(tensors, torch.stack(tensors).tolist(), strict=True)
    }


def _entry(value: Any, home: tuple[FlatParameters, int], scalars: Mapping[int, Scalar]) -> Entry:
    if not isinstance(value, Tensor):
        return CommonValue(value, on_device=False)
    if value.ndim == 0:
        return scalars[id(value)]
    if is_shard(value, *home):
        return ShardMark(value.dtype)
    return CommonValue(value.detach().to("cpu", copy=True), value.device.type != "cpu")


def _likeness(entries: Entries) -> object:
    """Return a key that is equal for equal entries: signs of zeros count, tensors compare by id."""
    zeros = []
    for _, entry in entries:
        if isinstance(entry, CommonValue):
            return id(entries)
        if isinstance(entry, Scalar) and not entry.value:
            zeros.append(str(entry.value))
    return (entries, *zeros) if zeros else entries
