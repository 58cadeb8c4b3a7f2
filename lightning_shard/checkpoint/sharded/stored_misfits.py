"""Whether stored weights fit a module, by the index alone: before anything is read or changed."""

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_shard.checkpoint.misfits import dtype_misfit, shape_misfit
from lightning_shard.checkpoint.sharded.folder import StoredTensor, read_all


def weight_misfits(
    module: nn.Module,
    state: Mapping[str, Any],
    *,
    strict: bool,
    left_out: Container[str] = (),
) -> list[str]:
    """Return as messages what does not fit.

    Args:
        module: The module that the weights are for, with full parameters.
        state: Tensors, stored or here, and other values by name.
        strict: Whether the names must be the module's.
        left_out: Names that may be missing all the same.
    """
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
        for found in (
            None if exchanges else shape_misfit(repr(name), stored.shape, value.shape),
            dtype_misfit(repr(name), stored.dtype, value.dtype),
        ):
            if found is not None:
                yield found


def _name_misfits(own: Iterable[str], state: Iterable[str]) -> list[str]:
    theirs, ours = set(state), set(own)
    missing = [repr(name) for name in own if name not in theirs]
    unexpected = [repr(name) for name in state if name not in ours]
    return [
        *([f"Missing key(s) in state_dict: {', '.join(missing)}"] if missing else []),
        *([f"Unexpected key(s) in state_dict: {', '.join(unexpected)}"] if unexpected else []),
    ]


def load_rest(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what is no parameter, by the module's own code: buffers, persistent metrics and such."""
    own = module.state_dict(keep_vars=True)
    rest = {
        name: value
        for name, value in state.items()
        if name in own and not isinstance(own[name], nn.Parameter)
    }
    module.load_state_dict(read_all(rest), strict=False)
