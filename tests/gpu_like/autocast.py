"""Autocast for the device: the kernels that torch has for GPUs, of the operations that models use.

torch registers them for each device that it knows, in C++; for one that Python brings it has none.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tests.gpu_like.device import NAME

_KEY = "AutocastPrivateUse1"
_NARROW = (  # as torch/amp documents for CUDA
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "scaled_dot_product_attention",
)
_WIDE = ("nll_loss", "cross_entropy_loss", "layer_norm", "softmax.int", "log_softmax.int", "pow")
_libraries: list[torch.library.Library] = []  # they register for as long as they live


def register_autocast() -> None:
    """Register the kernels, once in a process."""
    rest = torch.library.Library("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, dispatch_key=_KEY)
    kernels = torch.library.Library("aten", "IMPL")
    for name, wide in [*((one, False) for one in _NARROW), *((one, True) for one in _WIDE)]:
        for overload in _overloads(name):
            kernels.impl(overload, _kernel(overload, wide), _KEY)
    _libraries.extend([rest, kernels])


def _overloads(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name.split(".")[0])
    wanted = name.split(".")[1:] or ["default"]
    return [getattr(packet, one) for one in wanted if one in packet.overloads()]


def _kernel(overload: Any, wide: bool) -> Any:
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(torch.float32 if wide else torch.get_autocast_dtype(NAME))

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
            return overload(*args, **kwargs)

    return run
