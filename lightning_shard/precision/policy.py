"""From a precision string to number formats, and the layers that have another.

A layer keeps the format that user code asks for before a run converts the module to the Trainer's:

    setup, configure_model      self.router.float()          noted: the layer's own format
    strategy.setup              module.to(torch.bfloat16)    all but what was noted

What a class of Hugging Face names in `_keep_in_fp32_modules` counts as asked for, where the rest of
its module has the Trainer's format already: private names of transformers, checked with 5;
`tests/strategies/data_parallel/test_layers_of_another_format.py` fails when they change.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_shard.core.tensor_calls import Args, Function, Kwargs
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
_CONVERTS = frozenset(
    {Tensor.to, Tensor.type, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16}
)
_NAMED = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


def dtype_policy(precision: str, reduce_dtype: str | None = None) -> DTypePolicy:
    """Return the engine's formats for a Lightning precision string.

    Args:
        precision: Lightning's string; with a "true" one its plugin has converted the module.
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


class AskedFormats(TorchFunctionMode):
    """Notes from `begin` to `end` which tensors of modules are converted to a format by name."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: dict[int, Tensor] = {}  # by identity: what a module holds afterwards
        self._noting = ExitStack()

    def begin(self) -> None:
        """Note from now on."""
        self._noting.enter_context(self)

    def end(self) -> None:
        """Note nothing any more."""
        self._noting.close()

    def __torch_function__(
        self, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Run the function, and note a conversion that names a format."""
        result = func(*args, **(kwargs or {}))
        given = (*args[1:], *(kwargs or {}).values())
        names_format = any(isinstance(one, (torch.dtype, Tensor)) for one in given)
        if func in _CONVERTS and (func is not Tensor.to or names_format):
            held = args[0] if isinstance(args[0], nn.Parameter) else result
            if isinstance(held, Tensor):
                self._asked[id(held)] = held
        return result

    @contextmanager
    def kept(self, module: nn.Module, usual: torch.dtype | None) -> Iterator[None]:
        """Convert a module inside, of which some layers keep their formats; ends the notes.

        `usual` is the format of all other layers; None where nothing is converted.
        """
        asked = {*self._asked, *map(id, () if usual is None else _kept_by_name(module, usual))}
        self.end()
        places: list[dict[str, Any]] = [
            held for one in module.modules() for held in (one._parameters, one._buffers)
        ]
        kept = [
            (held, name, tensor, tensor.data)
            for held in places
            for name, tensor in held.items()
            if id(tensor) in asked and tensor.is_floating_point()
        ]
        self._asked.clear()
        yield
        for held, name, tensor, value in kept:
            tensor.data, held[name] = value, tensor


def _kept_by_name(module: nn.Module, usual: torch.dtype) -> Iterator[Tensor]:
    for one in module.modules():
        names = [name for attribute in _NAMED for name in getattr(one, attribute, None) or ()]
        params = dict(one.named_parameters()) if names else {}
        if any(param.dtype == usual for param in params.values()):
            kept = re.compile("|".join(rf"(^|\.){re.escape(name)}($|\.)" for name in names))
            yield from (param for name, param in params.items() if kept.search(name))
