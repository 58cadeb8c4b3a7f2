"""Quantised weights: how a run takes them over, and which are refused by name.

    bitsandbytes, 4 bits    the parameter has the elements as uint8, scales lie beside it
    bitsandbytes, 8 bits    so it does as int8; in a run its layer refers to them, and has no others
    torchao                 one tensor made of several, see `inner_tensors`; not trained

On CPUs layers of 4 bits pack their elements anew in the first forward in eval mode, in which layers
of Hugging Face's are in training, too; in a run they leave them as they are.

None of these packages is imported: parameters and layers are known by their attributes.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn

from lightning_shard.core.modules import hookable
from lightning_shard.data_parallel.memory.inner_tensors import (
    is_composed,
    put_together,
    take_apart,
)
from lightning_shard.errors import ConfigError

_SCALES = "SCB"  # of a parameter of bitsandbytes' 8-bit layers
_STATE = "quant_state"  # of a parameter of bitsandbytes' 4-bit layers
_PACKS_ANEW = "support_avx512bf16_for_cpu"  # of these layers
_PACKED = "_lightning_shard_packs_anew"  # set on them in a run


class _RefersToElements:
    """What a layer of 8 bits knows of its weight: the parameter has the elements, wherever."""

    layer: nn.Module

    @property
    def CB(self) -> Any:  # noqa: N802 - bitsandbytes' name
        return self.layer.weight.data


@cache
def _referring(kind: Any) -> Any:
    return type(kind.__name__, (_RefersToElements, kind), {})


def _refer(state: Any, layer: nn.Module) -> None:
    if state.CB is not None and not isinstance(state, _RefersToElements):
        vars(state).pop("CB")
        kind: Any = type(state)
        state.__class__ = _referring(kind)
        state.layer = layer


def _refer_no_more(state: Any) -> None:
    if isinstance(state, _RefersToElements):
        elements, own = state.CB, vars(state)
        state.__class__ = type(state).__bases__[1]
        own.pop("layer")
        own["CB"] = elements


def take_over(model: nn.Module) -> None:
    """Let a model's quantised weights lie in its parameters alone, and stay as they lie."""
    take_apart(model)
    module: Any
    for module in hookable(model):
        if vars(module).get(_PACKS_ANEW):
            setattr(module, _PACKS_ANEW, False)
            vars(module)[_PACKED] = True
        weight = _weight(module)
        if hasattr(weight, _SCALES) and hasattr(module, "init_8bit_state"):
            if weight.CB is not None:
                module.init_8bit_state()
            _refer(module.state, module)


def give_back(model: nn.Module) -> None:
    """Undo `take_over` for a model whose parameters are full again."""
    put_together(model)
    for module in hookable(model):
        if vars(module).pop(_PACKED, False):
            setattr(module, _PACKS_ANEW, True)
        _refer_no_more(vars(module).get("state"))


def pop_scales(model: nn.Module, state: dict[str, Any]) -> dict[nn.Module, Any]:
    """Take the scales of packed weights out of a state: their layers save them, and load none."""
    found: dict[nn.Module, Any] = {}
    for name, module in model.named_modules():
        own = getattr(_weight(module), _STATE, None)
        if own is not None and hasattr(type(own), "from_dict"):
            prefix = f"{name}.weight." if name else "weight."
            parts = {key: state.pop(key).clone() for key in [*state] if key.startswith(prefix)}
            if parts:
                found[module] = type(own).from_dict(parts, own.absmax.device)
    return found


def _weight(module: nn.Module) -> Any:
    """Return a layer's weight, or None; dictionaries of scripted modules have no `get`."""
    return dict(module._parameters.items()).get("weight")


def set_scales(found: Mapping[nn.Module, Any]) -> None:
    """Let weights have these scales, by their layers."""
    for module, scales in found.items():
        for one in (module, module._parameters["weight"]):
            if hasattr(one, _STATE):
                setattr(one, _STATE, scales)


def scales_of(model: nn.Module) -> dict[nn.Module, Any]:
    """Return the scales that packed weights have now, by their layers."""
    weights = {one: _weight(one) for one in model.modules()}
    return {one: getattr(w, _STATE) for one, w in weights.items() if hasattr(w, _STATE)}


def refuse_quantised(model: nn.Module, rank: int) -> None:
    """Raise for weights that flat buffers cannot hold."""
    for name, param in model.named_parameters():
        if is_composed(param):
            kind = type(param)
            raise ConfigError(
                f"Rank {rank}: the parameter {name!r} of {type(model).__name__} is a "
                f"{kind.__name__} ({kind.__module__}), one tensor made of several, as torchao "
                f"quantises, and is trained; expected plain elements, which lie in flat buffers. "
                f"Freeze it before the fit, or use Lightning's strategy='ddp'."
            )


def is_quantised(tensor: Tensor) -> bool:
    """Whether a parameter is of bitsandbytes' kind: elements, and beside them what they mean."""
    return hasattr(tensor, _SCALES) or hasattr(tensor, _STATE)


def refuse_quantised_parts(model: nn.Module, rank: int, scheme: str) -> None:
    """Raise ConfigError for quantised weights where a scheme gives ranks other parts of them."""
    for name, param in model.named_parameters():
        if is_quantised(param) or hasattr(type(param), "__tensor_flatten__"):
            raise ConfigError(
                f"Rank {rank}: the parameter {name!r} of {type(model).__name__} is a quantised "
                f"{type(param).__name__}, which {scheme} cannot leave to other ranks; expected "
                f"floating-point parameters. Use strategy='zero3', which shards weights of "
                f"bitsandbytes in 4 bits, or leave the model unquantised."
            )
