"""Quantised weights: which of them lie in flat buffers, and which are refused by name.

    bitsandbytes, 4 bits    elements are the parameter's own uint8, scales stay beside it   sharded
    bitsandbytes, 8 bits    the layer keeps the elements once more, full      stages 0 to 2
    torchao                 one tensor made of several, see `inner_tensors`   sharded; not trained

None of these packages is imported: a parameter is known by its attributes.
"""

from torch import Tensor, nn

from lightning_shard.data_parallel.memory.inner_tensors import is_composed
from lightning_shard.errors import ConfigError

_SCALES = "SCB"  # of a parameter of bitsandbytes' 8-bit layers
_STATE = "quant_state"  # of a parameter of bitsandbytes' 4-bit layers


def refuse_quantised(model: nn.Module, rank: int, *, stage: int) -> None:
    """Raise for weights that flat buffers cannot hold."""
    for name, param in model.named_parameters():
        kind = type(param)
        if is_composed(param):
            raise ConfigError(
                f"Rank {rank}: the parameter {name!r} of {type(model).__name__} is a "
                f"{kind.__name__} ({kind.__module__}), one tensor made of several, as torchao "
                f"quantises, and is trained; expected plain elements, which lie in flat buffers. "
                f"Freeze it before the fit, or use Lightning's strategy='ddp'."
            )
        if stage == 3 and hasattr(param, _SCALES):
            raise ConfigError(
                f"Rank {rank}: the parameter {name!r} of {type(model).__name__} is a "
                f"{kind.__name__}, of a layer that keeps its elements full beside it (8 bits of "
                f"bitsandbytes), so that ZeRO stage 3 would save nothing; expected 4 bits. "
                f"Quantise in 4 bits, or use strategy='zero2'."
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
