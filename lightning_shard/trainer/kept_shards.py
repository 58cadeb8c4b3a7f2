"""Tensors in shards that user code keeps on its objects: full tensors once the run is over.

    self.average = {n: p.detach().clone()}   in a hook, each rank has its shards of them
    self.activation = output                 in a split layer's hook, each has its part
    the run ends                             full tensors in these places, on every rank
    after the fit, and in another run        code goes on with them as on one device

They are looked for in the module and its parts, the callbacks and the data module: in lists, tuples
and mappings, and in objects of classes of the user's own. What some ranks have kept alone, and what
shows a parameter and is no copy of it, stays in shards: its use after the run is refused by name.
"""

from collections import deque
from collections.abc import Callable, Collection
from types import FunctionType, ModuleType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.averaged_gradient import AveragedGradient
from lightning_shard.data_parallel.parameter_shard import ShardView
from lightning_shard.data_parallel.presenting import of_all_ranks
from lightning_shard.data_parallel.sharded_tensor import ShardedTensor
from lightning_shard.data_parallel.torch_private import storage_key
from lightning_shard.launchers.replicas import find_owners
from lightning_shard.pipeline_parallel.containers import with_values
from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor

_Exchange = Callable[[str, Tensor], Tensor]
_OTHERS = (nn.Module, pl.Trainer, pl.Callback, pl.LightningDataModule, Optimizer, Dataset)
_NO_HOLDERS = (*_OTHERS, DataLoader, type, FunctionType, ModuleType)
_PLAIN = {type(None), bool, int, float, str, bytes}
_DEPTH, _MOST = 8, 10_000  # of what holds what, and entries: a data module may hold its samples
_PACKAGES = ("builtins", "torch", "lightning", "pytorch_lightning", "lightning_shard")


@torch.no_grad()
def complete_kept(trainer: "pl.Trainer", collectives: Collectives, live: Collection[int]) -> None:
    """Put full tensors where user code keeps what was read in shards; each rank must call.

    Args:
        trainer: The Trainer whose run ends.
        collectives: Group of all ranks.
        live: Storages of the parameters, by `storage_key`.
    """
    own: dict[str, Tensor] = {}

    def note(place: str, tensor: Tensor) -> Tensor:
        local = _local(tensor)
        if local is not None and storage_key(local) not in live:
            own[place] = tensor
        return tensor

    _exchange_all(trainer, note)
    common = set.intersection(*map(set, collectives.all_gather_object([*own])))
    full: dict[int, Tensor] = {}  # by what it was: two names of one tensor stay so
    for place in sorted(common):
        joined = _full(own[place])  # also of the same tensor, which another rank may have copied
        full.setdefault(id(own[place]), joined)
    if common:
        _exchange_all(trainer, lambda place, one: full[id(one)] if place in common else one)


def _local(tensor: Tensor) -> Tensor | None:
    """Return this rank's elements of a tensor in shards that can be full; None for any other."""
    if isinstance(tensor, DimShardedTensor):
        return tensor.part.local
    base = _base(tensor)
    return None if base is None or of_all_ranks(base.spread) is None else base.local


def _base(tensor: Tensor) -> ShardedTensor | None:
    """Return the sharded tensor that a tensor is or shows; None for any other."""
    if isinstance(tensor, AveragedGradient):
        return tensor.own  # none in one that stands for the optimizer's
    base = tensor.base if isinstance(tensor, ShardView) else tensor
    return base if isinstance(base, ShardedTensor) else None


def _full(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DimShardedTensor):
        return tensor.part.gather_detached()
    base = _base(tensor)
    assert base is not None
    base.spread = of_all_ranks(base.spread) or base.spread
    return tensor.full_tensor() if isinstance(tensor, ShardView) else base.full_tensor()


def _exchange_all(trainer: "pl.Trainer", exchange: _Exchange) -> None:
    """Exchange the tensors of the user's objects, each with a name of its place."""
    seen = set[int]()
    datamodule = getattr(trainer, "datamodule", None)
    for name, owner in find_owners(trainer, (datamodule,), {}).items():
        is_module = isinstance(owner, nn.Module)
        for path, part in owner.named_modules() if is_module else [("", owner)]:
            seen.add(id(vars(part).get("_parameters")))  # which are shown full by others
            _exchanged(vars(part), f"{name} {path}", exchange, seen)


def _exchanged(value: Any, place: str, exchange: _Exchange, seen: set[int]) -> Any:
    """Return a value with its tensors exchanged, in the same lists, mappings and objects."""
    if isinstance(value, Tensor):
        return exchange(place, value)
    if type(value) in _PLAIN or place.count("/") > _DEPTH:
        return value
    if isinstance(value, tuple):
        held = {
            index: _exchanged(one, f"{place}/{index}", exchange, seen)
            for index, one in enumerate(value)
        }
        is_same = all(one is value[index] for index, one in held.items())
        return value if is_same else with_values(value, held)
    holder = vars(value) if _is_holder(value) else value
    if not isinstance(holder, dict | list | deque) or len(holder) > _MOST or id(holder) in seen:
        return value
    seen.add(id(holder))
    for number, key in enumerate([*holder] if isinstance(holder, dict) else range(len(holder))):
        before = holder[key]
        after = _exchanged(before, f"{place}/{number}", exchange, seen)
        if after is not before:
            holder[key] = after
    return value


def _is_holder(value: Any) -> bool:
    """Whether a value is an object of a class of the user's own that may hold tensors."""
    if not hasattr(value, "__dict__") or isinstance(value, _NO_HOLDERS):
        return False
    return type(value).__module__.partition(".")[0] not in _PACKAGES
