"""From a precision string to number formats."""

import torch

from lightning_shard.data_parallel.options import DTypePolicy
from lightning_shard.errors import ConfigError

_COMPUTE: dict[str, torch.dtype | None] = {
    "32-true": None,
    "64-true": None,
    "bf16-true": None,
    "16-true": None,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}
TRUE_DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
_REDUCE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_policy(precision: str, reduce_dtype: str | None = None) -> DTypePolicy:
    """Return the engine's formats for a Lightning precision string.

    Args:
        precision: Lightning's string, such as "bf16-mixed"; with a "true" one Lightning's plugin
            has converted the module already.
        reduce_dtype: "float32", "bfloat16" or "float16", the format in which gradients travel;
            None for the format that they have in backward.

    Raises:
        ConfigError: The precision or the reduce_dtype is unknown.
    """
    if precision not in _COMPUTE:
        raise ConfigError(
            f"precision={precision!r} is not supported; choose one of {', '.join(_COMPUTE)}."
        )
    if reduce_dtype is not None and reduce_dtype not in _REDUCE:
        raise ConfigError(
            f"reduce_dtype={reduce_dtype!r} is not supported; choose one of {', '.join(_REDUCE)}, "
            f"or leave it out to send gradients in the format of backward."
        )
    return DTypePolicy(
        compute=_COMPUTE[precision], reduce=_REDUCE[reduce_dtype] if reduce_dtype else None
    )
