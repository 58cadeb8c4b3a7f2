"""Fewer bytes for gradients: codecs, and the exchange that averages a flat buffer through them.

exchange = find_compressor("int8").exchange(FlatBuffer(layout=layout, ranks=collectives))
exchange.begin(values, out)      # each rank
exchange.wait()                  # `out` holds the average
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated, Any, TypeAlias

from lightning_shard.core.options import Limit
from lightning_shard.data_parallel.compression.built_in import BF16, FP16, Int4, Int8, OneBit, TopK
from lightning_shard.data_parallel.compression.codec import Codec
from lightning_shard.data_parallel.compression.compressor import (
    Compressor,
    Exchange,
    FlatBuffer,
    Tally,
    Turn,
)
from lightning_shard.data_parallel.compression.power_sgd import PowerSGD
from lightning_shard.errors import ConfigError

__all__ = [
    "BF16",
    "COMPRESSORS",
    "FP16",
    "Codec",
    "Compression",
    "Compressor",
    "Exchange",
    "FlatBuffer",
    "Int4",
    "Int8",
    "OneBit",
    "PowerSGD",
    "Tally",
    "TopK",
    "Turn",
    "find_compressor",
]

# Names of strategies come of these names, as `core.schemes.COMPRESSIONS` has them, without torch.
COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    "fp16": FP16,
    "bf16": BF16,
    "int8": Int8,
    "int4": Int4,
    "topk": TopK,
    "powersgd": PowerSGD,
    "onebit": OneBit,
}
_KNOWN = ("none", *COMPRESSORS)
Compression: TypeAlias = (
    Annotated[str, Limit(f"that is one of {', '.join(map(repr, _KNOWN))}", _KNOWN.__contains__)]
    | Compressor
    | Annotated[dict[str, Any], Limit("with class_path and perhaps init_args")]
    | None
)
"""The option by which a user chooses what makes gradients smaller."""


def find_compressor(choice: Compression | Mapping[str, Any]) -> Compressor | None:
    """Return the compressor that the `compression` option names; None for no compression.

    Args:
        choice: A name ("none" among them), a compressor, or a mapping with `class_path` (a name,
            too) and perhaps `init_args`.
    """
    if choice is None or choice == "none" or isinstance(choice, Compressor):
        return choice if isinstance(choice, Compressor) else None
    if isinstance(choice, str):
        return _known(choice)()
    if isinstance(choice, Mapping) and set(choice) <= {"class_path", "init_args"}:
        return _configured(str(choice.get("class_path")), choice.get("init_args") or {})
    raise _unknown(choice)


def _known(name: str) -> Callable[..., Compressor]:
    if name not in COMPRESSORS:
        raise _unknown(name)
    return COMPRESSORS[name]


def _configured(path: str, options: Mapping[str, Any]) -> Compressor:
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(import_module(module), name) if module else _known(path)
        made = kind(**options)
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"The compression {path!r} with {dict(options)} cannot be made: {error}. Expected the "
            f"import path of a Compressor and its constructor's arguments."
        ) from error
    if not isinstance(made, Compressor):
        raise _unknown(path)
    return made


def _unknown(choice: object) -> ConfigError:
    return ConfigError(
        f"Unknown compression {choice!r}; expected one of 'none', "
        f"{', '.join(map(repr, COMPRESSORS))}, a Compressor, or a mapping with class_path and "
        f"init_args."
    )
