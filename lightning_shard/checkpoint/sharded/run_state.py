"""The state of a run as boxes of full tensors, by the module's names, and a folder read into it.

Boxes are views of the engine's shards: what is written from them is written as it is then, and what
is read into them is in the run. A module that renames, converts or computes what it loads is given
full tensors instead; what tells that is private to torch, and a test fails when it changes.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_shard.checkpoint.arriving import take_in_edits
from lightning_shard.checkpoint.misfits import dtype_misfits, shape_misfits
from lightning_shard.checkpoint.optimizer_state import (
    elements_of,
    full_form,
    is_kept,
    is_stepped,
    params_of,
    part_shape,
)
from lightning_shard.checkpoint.sharded.boxed_tensor import BoxedTensor, boxed_range
from lightning_shard.checkpoint.sharded.folder import StoredTensor, read_all
from lightning_shard.checkpoint.unread import exchanged
from lightning_shard.core.layout import whole
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.quantised import pop_scales, set_scales
from lightning_shard.data_parallel.model_split import in_place
from lightning_shard.data_parallel.optimizer_entries import (
    StateBlocks,
    flattened,
    joined,
    with_joined,
)
from lightning_shard.data_parallel.views.parameter_shard import ParameterShard, ShardView

_SHARDS = (ParameterShard, ShardView)


def module_boxes(module: nn.Module, engine: DataParallelEngine) -> dict[str, Any]:
    """Return the module's `state_dict` with this rank's boxes, in the optimizer's format."""
    engine.adopt_assigned()
    take_in_edits(engine)
    held = {param for flat in engine.flats for param in flat.params}
    held.update(engine.split.full_shapes)  # on other stages
    state = module.state_dict(keep_vars=True)
    for name, value in list(state.items()):
        if isinstance(value, nn.Parameter) and value in held:
            state[name] = parameter_boxes(value, engine)
        elif not engine.is_first and not isinstance(value, _SHARDS):
            del state[name]
        elif isinstance(value, Tensor):
            state[name] = value.detach()
    return state


def parameter_boxes(
    param: nn.Parameter, engine: DataParallelEngine, *, reading: bool = False
) -> BoxedTensor:
    """Return the boxes of a parameter in this rank's shard."""
    if not engine.split.is_here(param):
        flat = engine.flats[0]
        return BoxedTensor(engine.full_shape(param), flat.master_dtype, [])
    flat, index = engine.owner(param)
    return state_boxes(param, flat.master_views[index], engine, reading=reading)


def state_boxes(
    param: nn.Parameter,
    value: Tensor,
    engine: DataParallelEngine,
    *,
    reading: bool = False,
    elements: int = 1,
) -> BoxedTensor:
    """Return the boxes of a tensor that is cut as a shard is, with one element for so many."""
    flat, index = engine.owner(param)
    slot = flat.layout.slots[index]
    full_shape = engine.full_shape(param)
    if not reading and engine.split.is_shared(param) and not engine.split.counts(param):
        return BoxedTensor(full_shape, value.dtype, [])
    start = 0
    if flat.stage > 0:
        start = flat.layout.shard_slice(slot, flat.shard_index).param_offset
    if elements > 1:
        shape = part_shape(slot.shape, elements)
        flattened_value = value.detach().view(-1)
        return boxed_range(flattened_value, start // elements, shape, [in_place(shape)], shape)
    places = engine.split.places(param, slot.shape)
    return boxed_range(value.detach().view(-1), start, slot.shape, places, full_shape)


def optimizer_boxes(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], engine: DataParallelEngine
) -> dict[str, Any]:
    """Return an optimizer's state by parameters' names, with this rank's boxes, as torch's does."""
    boxes: dict[str, Any] = {
        "state": {
            names[param]: _entries(param, optimizer.state[param], engine)
            for param in params_of(optimizer)
            if param in names and optimizer.state.get(param) and _writes(param, engine)
        }
    }
    if engine.is_first:
        boxes["param_groups"] = [
            {**group, "params": [names[param] for param in group["params"] if param in names]}
            for group in optimizer.param_groups
        ]
    return boxes


def _writes(param: nn.Parameter, engine: DataParallelEngine) -> bool:
    """Whether this rank's entries are current, and not those of a stage that shares them."""
    if not is_stepped(param, engine):
        return False
    return not engine.split.is_shared(param) or engine.split.counts(param)


def _entries(
    param: nn.Parameter, entries: Mapping[str, Any], engine: DataParallelEngine
) -> dict[str, Any]:
    entries = flattened(entries)
    if engine.owners.gathers(param):
        shape = torch.Size(engine.full_shape(param))
        return {
            key: _full_box(value)
            if isinstance(value, Tensor) and value.ndim > 0 and value.shape == shape
            else value
            for key, value in entries.items()
        }
    return {
        key: state_boxes(param, value.contiguous(), engine, elements=elements)
        if (elements := elements_of(key, value, param, engine))
        else full_form(value, param, engine)
        for key, value in entries.items()
    }


def _full_box(value: Tensor) -> BoxedTensor:
    value = value.detach().contiguous()
    return BoxedTensor(value.shape, value.dtype, [(whole(value.shape), value)])


@torch.no_grad()
def empty_entry(
    param: nn.Parameter, dtype: torch.dtype, engine: DataParallelEngine, elements: int = 1
) -> tuple[Tensor, BoxedTensor]:
    """Return memory for a state tensor that is cut as a parameter, and its boxes to read into."""
    flat, index = engine.owner(param)
    if engine.owners.gathers(param):
        value = flat.master.new_zeros(tuple(engine.full_shape(param)), dtype=dtype)
        return value, _full_box(value)
    own = flat.master_views[index]
    value = own.new_zeros(-(-own.numel() // elements), dtype=dtype)
    if flat.is_owned or flat.stage == 0:
        value = value.view(flat.layout.slots[index].shape)
    return value, state_boxes(param, value, engine, reading=True, elements=elements)


_LEAVE_PARAMETERS_ALONE = ("torch.nn.modules.", "torchmetrics.", "lightning.")
_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks")


def weight_misfits(
    module: nn.Module, state: Mapping[str, Any], *, strict: bool, left_out: Container[str] = ()
) -> list[str]:
    """Return as messages what does not fit a module with full parameters."""
    own = module.state_dict(keep_vars=True)
    found = list(_tensor_misfits(own, state))
    if strict:
        expected = [name for name in own if name in state or name not in left_out]
        found += _name_misfits(expected, state)
    return found


def _tensor_misfits(own: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[str]:
    for name, value in own.items():
        stored = state.get(name)
        if not isinstance(stored, StoredTensor | Tensor) or not isinstance(value, Tensor):
            continue
        exchanges = isinstance(stored, Tensor) and stored.numel() == value.numel() == 1  # as torch
        if not exchanges:
            yield from shape_misfits(repr(name), stored.shape, value.shape)
        yield from dtype_misfits(repr(name), stored.dtype, value.dtype)


def _name_misfits(own: Iterable[str], state: Iterable[str]) -> list[str]:
    theirs, ours = set(state), set(own)
    missing = [repr(name) for name in own if name not in theirs]
    unexpected = [repr(name) for name in state if name not in ours]
    told = {"Missing": missing, "Unexpected": unexpected}
    return [
        f"{what} key(s) in state_dict: {', '.join(names)}" for what, names in told.items() if names
    ]


def load_rest(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what is no parameter, by the module's own code: buffers, persistent metrics and such."""
    own = module.state_dict(keep_vars=True)
    rest = {
        name: value
        for name, value in state.items()
        if name in own and not isinstance(own[name], nn.Parameter)
    }
    read = read_all(rest)
    set_scales(pop_scales(module, read))
    module.load_state_dict(read, strict=False)


@torch.no_grad()
def read_weights(module: nn.Module, state: Mapping[str, Any], engine: DataParallelEngine) -> None:
    """Read weights, which are known to fit, into the engine's shards; each rank must call."""
    targets: dict[str, Any] = {}
    folder = None
    held = {param for flat in engine.flats for param in flat.params}
    for name, param in module.named_parameters():
        stored = state.get(name)
        if isinstance(stored, StoredTensor) and param in held:
            targets[stored.key] = parameter_boxes(param, engine, reading=True)
            folder = stored.folder
    if folder is not None:
        with engine.optimizer_view():  # in which only shards are here
            folder.read(targets)
    engine.publish_shards()


def local_optimizer_state(
    state: Mapping[str, Any], optimizer: Optimizer, engine: DataParallelEngine
) -> dict[str, Any]:
    """Return the state of this rank's shards, read from a folder; `state` is full, by number."""
    params = params_of(optimizer)
    targets: dict[str, Any] = {}
    folders = []
    entries: dict[Any, Any] = {}
    for number, saved in state["state"].items():
        if number not in range(len(params)):  # what the optimizer keeps of itself
            entries[number] = saved
            continue
        if not is_kept(params[number], engine):
            continue
        own = entries[number] = dict(saved)
        for key, stored in saved.items():
            elements = _elements_of(key, stored, params[number], engine)
            if elements:
                own[key], boxes = empty_entry(params[number], stored.dtype, engine, elements)
                targets[stored.key] = boxes
                folders.append(stored.folder)
    if folders:
        folders[0].read(targets)
    local: dict[str, Any] = read_all({**state, "state": entries})  # counters, rates in tensors
    for number in set(entries) & {*range(len(params))}:
        own = {
            key: full_form(value, params[number], engine, back=True)
            for key, value in local["state"][number].items()
        }
        local["state"][number] = joined(own)
    return local


def _elements_of(key: str, stored: Any, param: nn.Parameter, engine: DataParallelEngine) -> int:
    """Return how many of a parameter's elements one of a stored entry stands for; 0: all."""
    if not isinstance(stored, StoredTensor):
        return 0
    blocks = engine.options.blocks.get(param, StateBlocks({}))
    return blocks.elements_of_full(key, stored, engine.full_shape(param))


def placeholders(states: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return states with placeholders for stored tensors, to be checked."""
    found = [exchanged(state, StoredTensor.placeholder) for state in states]
    return [with_joined(state) for state in found]


def loads_plainly(module: nn.Module) -> bool:
    """Whether nothing but torch's own code takes the parameters out of a `state_dict`."""
    return all(_is_plain(part) for part in module.modules())


def _is_plain(part: nn.Module) -> bool:
    kind = type(part)
    methods = (kind._load_from_state_dict, kind._save_to_state_dict)
    known = all(method.__module__.startswith(_LEAVE_PARAMETERS_ALONE) for method in methods)
    return (
        known
        and kind.load_state_dict is nn.Module.load_state_dict
        and kind.state_dict is nn.Module.state_dict
        and kind.set_extra_state is nn.Module.set_extra_state
        and not any(getattr(part, name) for name in _HOOKS)
        and not any(is_lazy(param) for param in part.parameters(recurse=False))
    )
