"""The full format: an ordinary Lightning `.ckpt`, the same whatever scheme has written it.

Parameters come together buffer by buffer, so that no rank but rank 0 holds more than one unit
above its share; rank 0 holds the whole on the CPU, as it must to write one file.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_shard.data_parallel.engine import DataParallelEngine


def full_module_state(module: nn.Module, engine: DataParallelEngine) -> dict[str, Any]:
    """The module's `state_dict` with whole parameters; each rank must call.

    Returns:
        On rank 0 every entry, on the CPU, parameters in the optimizer's format; {} elsewhere.
    """
    whole: dict[int, Tensor] = {}
    for param, value in engine.whole_parameters():
        if engine.is_first:
            whole[id(param)] = value.to("cpu", copy=True)
    if not engine.is_first:
        return {}
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():  # in place: torch's own mapping knows module versions
        state[name] = whole[id(value)] if id(value) in whole else _plain(value)
    return state


def _plain(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


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
