"""Optimizer state between its two forms: shards per rank, and full tensors on one rank.

A state tensor belongs to a parameter's elements when it has as many of them as the parameter; it
is cut and joined as the parameter is. So is one that has an element for each of its blocks, where
shards end with blocks. Everything else (step counters) is the same on all ranks.
Where one rank owns a full parameter, or gathers it for each update, all of its state is there,
whatever its shape (Adafactor's rows and columns, Shampoo's factors), and nothing on other ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.arriving import (
    ArrivingTensor,
    SlicedTensor,
    arriving,
    arriving_of,
    slices_of,
)
from lightning_shard.checkpoint.misfits import length_misfits
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.optimizer_entries import (
    EntryForm,
    flattened,
    host_copy,
    joined,
    of_itself,
)
from lightning_shard.errors import CheckpointError


def shard_state(optimizer: Optimizer, engine: DataParallelEngine) -> None:
    """Cut the state that an optimizer has made for full parameters, in place."""
    for param in params_of(optimizer):
        if not is_kept(param, engine):
            optimizer.state.pop(param, None)
            continue
        entries = optimizer.state.get(param, {})
        for key, value in entries.items():
            entries[key] = own_state(key, value, param, engine)


def own_state(key: str, value: Any, param: nn.Parameter, engine: DataParallelEngine) -> Any:
    """Return what this rank keeps of an entry of a parameter's full state."""
    if not engine.knows(param):  # what the model has lost
        return value
    blocks = engine.options.blocks.get(param)
    if blocks is not None:
        flat, index = engine.owner(param)
        slot = flat.layout.slots[index]
        own = flat.layout.shard_slice(slot, flat.shard_index)
        return blocks.part(key, value, slot.shape, range(own.param_offset, own.param_stop))
    form = EntryForm.of(value)
    if form is not None:
        parts = {n: own_state(f"{key}.{n}", form.part(value, n), param, engine) for n in form.names}
        return form.joined(parts)
    if not isinstance(value, Tensor):
        return value
    is_gathered = engine.owners.gathers(param)
    full = value.clone() if is_gathered else engine.split.local(param, value)
    return _cut(key, full, *engine.owner(param))


def local_state_dict(
    full: Mapping[str, Any], optimizer: Optimizer, engine: DataParallelEngine
) -> dict[str, Any]:
    """Cut a full optimizer `state_dict` down to this rank's shards, or raise if it does not fit."""
    if not optimizer.param_groups or "state" not in full:  # a form of its own, for full state
        return dict(full)
    for misfit in length_misfits(full["param_groups"], optimizer):
        raise CheckpointError(
            f"The {misfit.removeprefix('the ')}. Resume with the model and the groups that it was "
            f"saved with, or load only the weights."
        )
    numbers = [number for group in full["param_groups"] for number in group["params"]]
    params = dict(zip(numbers, params_of(optimizer), strict=True))
    state = {
        key: {name: own_state(name, value, params[key], engine) for name, value in entries.items()}
        if key in params
        else entries
        for key, entries in full["state"].items()
        if key not in params or is_kept(params[key], engine)
    }
    return {**full, "state": state}


def full_state_dict(optimizer: Optimizer, engine: DataParallelEngine) -> dict[str, Any]:
    """Bring the full optimizer state to rank 0's CPU, one buffer at a time; each must call."""
    state = FullOptimizerState(optimizer, engine)
    return state.with_tensors({place: full.tensor().cpu() for place, full in state.tensors()})


def put_full_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Let an optimizer have the full state on the rank that has it, and none on others."""
    optimizer.state.clear()
    if state:
        optimizer.load_state_dict(state)


class FullOptimizerState:
    """An optimizer's full state, whose tensors each rank must run through before it changes."""

    def __init__(self, optimizer: Optimizer, engine: DataParallelEngine) -> None:
        self.shapes: dict[tuple[int, str], tuple[Sequence[int], torch.dtype]] = {}
        self._engine, self._params = engine, params_of(optimizer)
        self._packed: dict[str, Any] = {}
        self._own = of_itself(optimizer)
        self._common: dict[int, dict[str, Any]] = {}
        self._slices: dict[int, dict[str, _Cut]] = {}
        self._owned: dict[int, dict[str, _Owned]] = {}
        if not engine.groups.is_first_copy:
            return
        engine.adopt_assigned()  # a parameter that was replaced is in its place again
        self._packed = _packed(optimizer)
        if "state" in self._packed:
            state = self._packed["state"].items()
            flat = {key: flattened(one) if isinstance(one, dict) else one for key, one in state}
            self._packed = {**self._packed, "state": flat}
        if not optimizer.param_groups or "state" not in self._packed:
            return  # it stands for none at all, or has a form of its own and is not cut
        numbers = range(len(self._params))
        entries = {key: one for key, one in self._packed["state"].items() if key in numbers}
        agreed = _agree_on_keys(entries, self._params, engine)
        self._slices, self._common, self._owned = map(agreed.__getitem__, _KINDS)
        if engine.is_first:
            self.shapes = {
                (index, key): (cut.shape(engine.full_shape(self._params[index])), cut.dtype)
                for index, entries in self._slices.items()
                for key, cut in entries.items()
            }
            self.shapes |= {
                (index, key): (value.shape, value.dtype)
                for index, entries in self._owned.items()
                for key, value in entries.items()
            }

    def tensors(self) -> Iterator[tuple[tuple[int, str], ArrivingTensor]]:
        """Bring the entries together, key by key in the order of the model; each rank must call."""
        engine = self._engine
        if not self._packed or not self._params:
            return
        entries = self._entries()
        params = [self._params[index] for index, _ in entries]

        def sliced(number: int, ranks: Collectives) -> SlicedTensor | None:
            is_here = engine.split.is_here(params[number])
            return self._sliced(entries[number], ranks) if is_here else None

        def alone(number: int) -> Tensor:
            index, key = entries[number]
            return params[number].detach().new_empty(0, dtype=self._slices[index][key].dtype)

        for number, full in arriving_of(params, sliced, alone, engine):
            yield entries[number], full
        owned = [(index, key) for index, keys in sorted(self._owned.items()) for key in keys]
        ours = [one for one in owned if self._owned[one[0]][one[1]].model_ranks == _ranks(engine)]
        coming = arriving([self._on_owner(one) for one in ours], engine.groups.shard, engine.device)
        for index, key in owned:
            one = self._owned[index][key]
            arrived = next(coming) if one.model_ranks == _ranks(engine) else None
            if engine.collectives.rank == 0:
                arrived = _brought(one, arrived, engine)
            if engine.is_first:
                assert arrived is not None
                yield (index, key), arrived
        for _ in coming:  # to its end
            pass

    def _entries(self) -> list[tuple[int, str]]:
        """Return the entries that lie in shards, in the order in which they come."""
        position = {param: place for place, param in enumerate(self._engine.model.parameters())}
        entries = [(index, key) for index, keys in self._slices.items() for key in keys]

        def order(entry: tuple[int, str]) -> tuple[str, int]:
            index, key = entry  # a parameter that a module has lost comes after all others
            return str(key), position.get(self._params[index], len(position) + index)

        return sorted(entries, key=order)

    def _sliced(self, entry: tuple[int, str], ranks: Collectives) -> SlicedTensor:
        index, key = entry
        param = self._params[index]
        flat, place = self._engine.owner(param)
        value = self._packed["state"].get(index, {}).get(key)
        cut = self._slices[index][key]
        own = value if elements_of(key, value, param, self._engine) else None
        return slices_of(flat, place, own, cut.dtype, ranks, elements=cut.elements)

    def _on_owner(self, entry: tuple[int, str]) -> SlicedTensor:
        """Return a tensor that one rank has, whatever its shape."""
        index, key = entry
        one, ranks = self._owned[index][key], self._engine.groups.shard
        numels = [0] * ranks.size
        numels[one.owner] = one.shape.numel()
        own = self._packed["state"][index][key] if ranks.rank == one.owner else None
        return SlicedTensor(one.shape, one.dtype, numels, own)

    def with_tensors(self, tensors: Mapping[tuple[int, str], Tensor]) -> dict[str, Any]:
        """Return the `state_dict` of a single device with these tensors in it; empty elsewhere."""
        if not self._engine.is_first or not self._params or "state" not in self._packed:
            return self._packed if self._engine.is_first else {}
        state = {key: host_copy(value) for key, value in self._own.items()}
        state |= {
            index: joined(
                {
                    **self._common.get(index, {}),
                    **{key: tensors[index, key] for key in self._slices.get(index, ())},
                    **{key: tensors[index, key] for key in self._owned.get(index, ())},
                }
            )
            for index in sorted({*self._common, *self._slices, *self._owned})
        }
        return {**self._packed, "state": state}


_KINDS = ("shard", "common", "owned")  # of entries, see `_told`


class _Cut(NamedTuple):
    """A state tensor in shards, of which each element stands for some of the parameter's."""

    dtype: torch.dtype
    elements: int

    def shape(self, full: Sequence[int]) -> Sequence[int]:
        """Return the shape of the full tensor for a parameter's."""
        return full if self.elements == 1 else part_shape(full, self.elements)


class _Owned(NamedTuple):
    """A state tensor on its owner, by ranks of the shard group and of others of the model."""

    shape: torch.Size
    dtype: torch.dtype
    owner: int
    model_ranks: tuple[int, ...]


def _ranks(engine: DataParallelEngine) -> tuple[int, ...]:
    """Return this rank's number in each of the groups that share the model."""
    return tuple(group.rank for group in engine.split.groups)


def _brought(
    one: _Owned, arrived: ArrivingTensor | None, engine: DataParallelEngine
) -> ArrivingTensor | None:
    """Bring a tensor to the first of the ranks that share the model, group by group."""
    # `arrived` is None on ranks that do not have it.
    mine = _ranks(engine)
    for at, (group, source) in enumerate(zip(engine.split.groups, one.model_ranks, strict=True)):
        is_on_way = not any(mine[:at]) and mine[at + 1 :] == one.model_ranks[at + 1 :]
        if not source or not is_on_way:
            continue
        if group.rank == source:
            assert arrived is not None
            group.send(arrived.tensor(), 0)
        elif group.rank == 0:
            tensor = torch.empty(one.shape, dtype=one.dtype, device=engine.device)
            group.recv(tensor, source)
            arrived = ArrivingTensor.here(tensor)
    return arrived


def _agree_on_keys(
    state: Mapping[int, Mapping[str, Any]], params: list[nn.Parameter], engine: DataParallelEngine
) -> dict[str, dict[int, dict[str, Any]]]:
    """Agree on the entries to join: a rank without a shard of a parameter has no state for it."""
    mine: dict[int, dict[str, Any]] = {}
    for index, entries in state.items():
        if not engine.split.is_here(params[index]):
            continue
        if not is_stepped(params[index], engine):
            continue  # its counters are stale
        param = params[index]
        mine[index] = {key: _told(key, value, param, engine) for key, value in entries.items()}
    for group in (engine.groups.shard, *engine.split.groups):
        theirs = group.all_gather_object(mine)
        mine = {}
        for one in theirs:
            for index, entries in one.items():
                mine.setdefault(index, {}).update(entries)
    of_kind: dict[str, dict[int, dict[str, Any]]] = {kind: {} for kind in _KINDS}
    for index, entries in mine.items():
        for key, (kind, value) in entries.items():
            of_kind[kind].setdefault(index, {})[key] = value
    return of_kind


def _told(key: str, value: Any, param: nn.Parameter, engine: DataParallelEngine) -> tuple[str, Any]:
    """Return what other ranks have to know of a state entry of this rank, and its kind."""
    if not engine.knows(param):
        return "common", host_copy(value)
    flat, _ = engine.owner(param)
    is_gathered = engine.owners.gathers(param)
    elements = 0 if is_gathered else elements_of(key, value, param, engine)
    if elements:
        return "shard", _Cut(value.dtype, elements)
    has_elements = isinstance(value, Tensor) and value.ndim > 0
    if has_elements and (is_gathered or flat.is_owned):
        owner = engine.groups.shard.rank if flat.stage > 0 else 0
        return "owned", _Owned(value.shape, value.dtype, owner, _ranks(engine))
    return "common", host_copy(full_form(value, param, engine))


def _packed(optimizer: Optimizer) -> dict[str, Any]:
    """Return its own `state_dict`, without state of parameters that a group has had before."""
    listed = set(params_of(optimizer))
    orphans = [one for one in optimizer.state if isinstance(one, Tensor) and one not in listed]
    aside = {param: optimizer.state.pop(param) for param in orphans}
    packed = optimizer.state_dict()
    optimizer.state.update(aside)
    return packed


def params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return every parameter of every group, in order."""
    return [*chain.from_iterable([group["params"] for group in optimizer.param_groups])]


def is_kept(param: nn.Parameter, engine: DataParallelEngine) -> bool:
    """Whether this rank keeps state of a parameter, and not its owner alone."""
    if not engine.split.is_here(param) or engine.owners.gathered_elsewhere(param):
        return False
    if not engine.knows(param):
        return True
    flat, index = engine.owner(param)
    return not (flat.is_owned and is_on_other_ranks(flat, index))


def is_stepped(param: nn.Parameter, engine: DataParallelEngine) -> bool:
    """Whether an optimizer updates elements of a parameter on this rank."""
    if not engine.split.is_here(param) or engine.owners.gathered_elsewhere(param):
        return False
    return not (engine.knows(param) and is_on_other_ranks(*engine.owner(param)))


def is_on_other_ranks(flat: FlatParameters, index: int) -> bool:
    """Whether all of a parameter's elements lie on other ranks."""
    return flat.layout.slots[index].numel > 0 and not flat.local_views[index].numel()


def elements_of(key: str, value: Any, param: nn.Parameter, engine: DataParallelEngine) -> int:
    """Return how many of the shard's elements one of a local entry stands for; 0: it is not cut."""
    flat, index = engine.owner(param)
    blocks = engine.options.blocks.get(param)
    if blocks is None or not isinstance(value, Tensor):
        return int(is_shard(value, flat, index))
    local = flat.local_views[index]
    elements = blocks.elements_of(key, value, local.shape)
    return elements if elements and value.numel() == -(-local.numel() // elements) else 0


def full_form(
    value: Any, param: nn.Parameter, engine: DataParallelEngine, *, back: bool = False
) -> Any:
    """Return what a full state has in the place of a local entry that is not cut; or `back`."""
    if isinstance(value, EntryForm) and param in engine.options.blocks:
        flat, index = engine.owner(param)
        shapes = tuple(flat.local_views[index].shape), tuple(engine.full_shape(param))
        own, other = shapes[::-1] if back else shapes
        if value.shape == own:
            return value.of_shape(other)
    return value


def part_shape(full: Sequence[int], elements: int) -> tuple[int]:
    """Return the shape of what has an element for so many of a tensor of this shape."""
    return (-(-torch.Size(full).numel() // elements),)


def is_shard(value: Any, flat: FlatParameters, index: int) -> bool:
    """Whether a local state tensor has an element for each of the shard's."""
    shape = flat.layout.slots[index].shape if flat.is_owned else flat.local_views[index].shape
    return isinstance(value, Tensor) and value.ndim > 0 and tuple(value.shape) == tuple(shape)


def _cut(key: str, value: Tensor, flat: FlatParameters, index: int) -> Tensor:
    """Return a copy of this rank's shard of a full state tensor, whose file may be mapped."""
    slot = flat.layout.slots[index]
    is_counter = value.ndim == 0 and key == "step"  # of a scalar parameter
    is_whole = tuple(value.shape) != slot.shape or flat.stage == 0 or flat.is_owned
    if is_whole or is_counter:
        return value.clone()
    shard_slice = flat.layout.shard_slice(slot, flat.shard_index)
    return value.flatten()[shard_slice.param_offset : shard_slice.param_stop].clone()
