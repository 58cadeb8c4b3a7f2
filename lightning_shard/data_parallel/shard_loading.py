"""`load_state_dict` in a hook of ZeRO stage 3: full tensors are cut for parameters in shards."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_shard.data_parallel.flat_parameters import FlatParameters


def cut_loaded(
    model: nn.Module, homes: Mapping[nn.Parameter, tuple[FlatParameters, int]]
) -> list[RemovableHandle]:
    """Let each module of a model take in full tensors as well as shards.

    Args:
        model: The module whose parameters are sharded.
        homes: By parameter, its buffer and its index there.
    """

    # A closure, not a bound method: a copy of a module copies methods' owners.
    def before(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, param in module._parameters.items():
            value = state.get(prefix + name)
            if param is not None and param in homes and isinstance(value, Tensor):
                flat, index = homes[param]
                state[prefix + name] = flat.as_shown(index, value)

    return [
        module.register_load_state_dict_pre_hook(before)  # type: ignore[no-untyped-call]
        for module in model.modules()
        if module._parameters
    ]
