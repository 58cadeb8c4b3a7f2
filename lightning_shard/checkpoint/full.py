"""The full format: an ordinary Lightning `.ckpt`, the same whatever scheme has written it.

Parameters come together buffer by buffer, so that no rank but rank 0 holds more than one unit
above its share; rank 0 holds the whole on the CPU, as it must to write one file.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.model_split import Unsplit
from lightning_shard.optim.state import is_piece, params_of


def full_module_state(module: nn.Module, engine: DataParallelEngine) -> dict[str, Any]:
    """The module's `state_dict` with whole parameters; each rank must call.

    Returns:
        On rank 0 every entry, on the CPU, parameters in the optimizer's format. On other ranks the
        same entries: with the module's own tensors where each rank has whole parameters anyway, up
        to stage 2; else without elements, see `module_shapes`.
    """
    everywhere = engine.options.stage < 3 and isinstance(engine.split, Unsplit)
    whole: dict[int, Tensor] = {}
    for param, value in engine.whole_parameters(everywhere=everywhere):
        is_own = value.data_ptr() == param.data_ptr() and not engine.is_first
        whole[id(param)] = value if is_own else value.to("cpu", copy=True)
    if not engine.is_first and not (everywhere and engine.groups.is_first_copy):
        return module_shapes(module, engine)
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():  # in place: torch's own mapping knows module versions
        state[name] = whole[id(value)] if id(value) in whole else _plain(value, engine)
    return state


def module_shapes(module: nn.Module, engine: DataParallelEngine) -> dict[str, Any]:
    """The whole module's `state_dict` without elements, for code that asks what is in it.

    Returns:
        Tensors on torch's "meta" device, with whole shapes: what would read an element raises.
        Buffers as they are here.
    """
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():
        is_param = isinstance(value, nn.Parameter)
        state[name] = _shape_of(value, engine) if is_param else _plain(value, engine)
    return state


def optimizer_shapes(optimizer: Optimizer, engine: DataParallelEngine) -> dict[str, Any]:
    """The optimizer's `state_dict` without elements, in the same way; no communication."""
    packed = optimizer.state_dict()
    params = params_of(optimizer)
    packed["state"] = {
        index: {
            key: _shape_of(params[index], engine, value.dtype)
            if is_piece(value, *engine.owner(params[index]))
            else value
            for key, value in entries.items()
        }
        for index, entries in packed["state"].items()
    }
    return packed


def _shape_of(
    param: nn.Parameter, engine: DataParallelEngine, dtype: torch.dtype | None = None
) -> Tensor:
    shape: Sequence[int] = engine.split.full_shapes.get(param, param.shape)
    if param not in engine.split.full_shapes and engine.split.is_here(param):
        flat, index = engine.owner(param)
        shape, dtype = flat.layout.slots[index].shape, dtype or flat.shard.dtype
    return torch.empty(tuple(shape), dtype=dtype or param.dtype, device="meta")


def _plain(value: Any, engine: DataParallelEngine) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().cpu() if engine.is_first else value.detach()


def load_module_state(
    module: nn.Module, engine: DataParallelEngine, state: Mapping[str, Any], *, strict: bool
) -> None:
    """Load a whole `state_dict` into a module that an engine holds; no communication.

    The whole module is on the CPU for a moment, as when it was made.

    Raises:
        RuntimeError: torch's, when names or shapes do not fit.
    """
    missing: list[str] = []
    with engine.loading(missing):
        missing += module.load_state_dict(state, strict=strict).missing_keys
