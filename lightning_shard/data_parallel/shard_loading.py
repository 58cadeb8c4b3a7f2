"""`load_state_dict` in a hook of ZeRO stage 3: full tensors are cut for parameters in shards."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_shard.data_parallel.flat_parameters import FlatParameters
from lightning_shard.data_parallel.model_split import ModelSplit
from lightning_shard.data_parallel.scripted import hookable


def cut_loaded(
    model: nn.Module,
    homes: Mapping[nn.Parameter, tuple[FlatParameters, int]],
    split: ModelSplit,
) -> list[RemovableHandle]:
    """Let each module of a model take in full tensors as well as shards.

    Args:
        model: The module whose parameters are sharded.
        homes: By parameter, its buffer and its index there.
        split: How the model is split over other ranks.
    """

    def own(param: nn.Parameter, value: Tensor) -> Tensor:
        if value.shape == split.full_shapes.get(param):  # not so where the user has cut it
            if not split.is_here(param):
                return param.data  # another rank has it
            value = split.local(param, value)
        flat, index = homes[param]
        return flat.as_shown(index, value)

    # A closure, not a bound method: a copy of a module copies methods' owners.
    def before(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, param in module._parameters.items():
            value = state.get(prefix + name)
            known = param in homes or param in split.full_shapes
            if param is not None and known and isinstance(value, Tensor):
                state[prefix + name] = own(param, value)

    return [
        module.register_load_state_dict_pre_hook(before)  # type: ignore[no-untyped-call]
        for module in hookable(model)
        if module._parameters
    ]
