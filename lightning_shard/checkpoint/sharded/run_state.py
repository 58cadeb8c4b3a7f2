"""The state of a run as boxes of full tensors, in the module's own names; nothing is sent.

Boxes are views of the engine's shards: what is written from them is written as it is then, and what
is read into them is in the run.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.checkpoint.arriving import take_in_edits
from lightning_shard.checkpoint.optimizer_state import is_shard, is_stepped, params_of
from lightning_shard.checkpoint.sharded.boxed_tensor import BoxedTensor, boxed_range
from lightning_shard.core.layout.boxes import whole
from lightning_shard.data_parallel.engine import DataParallelEngine


def module_boxes(module: nn.Module, engine: DataParallelEngine) -> dict[str, Any]:
    """Return the module's `state_dict` with this rank's boxes in the place of parameters.

    They are in the optimizer's format. The rank that gets full states has everything else, too.
    """
    engine.adopt_assigned()
    take_in_edits(engine)
    held = {param for flat in engine.flats for param in flat.params}
    held.update(engine.split.full_shapes)  # on other stages
    state = module.state_dict(keep_vars=True)
    for name, value in list(state.items()):
        if isinstance(value, nn.Parameter) and value in held:
            state[name] = parameter_boxes(value, engine)
        elif engine.is_first:
            state[name] = value.detach() if isinstance(value, Tensor) else value
        else:
            del state[name]
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
    param: nn.Parameter, value: Tensor, engine: DataParallelEngine, *, reading: bool = False
) -> BoxedTensor:
    """Return the boxes of a tensor that is cut as this rank's shard of a parameter is."""
    flat, index = engine.owner(param)
    slot = flat.layout.slots[index]
    full_shape = engine.full_shape(param)
    if not reading and engine.split.is_shared(param) and not engine.split.counts(param):
        return BoxedTensor(full_shape, value.dtype, [])
    start = 0
    if flat.stage > 0:
        start = flat.layout.shard_slice(slot, flat.shard_index).param_offset
    places = engine.split.places(param, slot.shape)
    return boxed_range(value.detach().view(-1), start, slot.shape, places, full_shape)


def optimizer_boxes(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], engine: DataParallelEngine
) -> dict[str, Any]:
    """Return an optimizer's state by the parameters' names, with this rank's boxes.

    What a module has lost in mid-run has no name, and is left out.

    Returns:
        As torch's `get_optimizer_state_dict`: the entries of the parameters of which this rank has
        elements, and on the rank that gets full states the groups.
    """
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
    if engine.owners.gathers(param):
        shape = torch.Size(engine.full_shape(param))
        return {
            key: _full_box(value) if _has_shape(value, shape) else value
            for key, value in entries.items()
        }
    return {
        key: state_boxes(param, value.contiguous(), engine)
        if is_shard(value, *engine.owner(param))
        else value
        for key, value in entries.items()
    }


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape == shape


def _full_box(value: Tensor) -> BoxedTensor:
    """Return a tensor that is full on this rank as one box."""
    value = value.detach().contiguous()
    return BoxedTensor(value.shape, value.dtype, [(whole(value.shape), value)])


@torch.no_grad()
def empty_entry(
    param: nn.Parameter, dtype: torch.dtype, engine: DataParallelEngine
) -> tuple[Tensor, BoxedTensor]:
    """Return memory for a state tensor that is cut as a parameter, and its boxes to read into."""
    flat, index = engine.owner(param)
    if engine.owners.gathers(param):
        value = flat.master.new_zeros(tuple(engine.full_shape(param)), dtype=dtype)
        return value, _full_box(value)
    value = torch.zeros_like(flat.master_views[index], dtype=dtype)
    if flat.is_owned:
        value = value.view(flat.layout.slots[index].shape)
    return value, state_boxes(param, value, engine, reading=True)
