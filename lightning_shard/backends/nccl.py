"""NCCL: torch's own backend for CUDA devices, one rank to a device."""

from typing import ClassVar

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_shard.backends.base import Backend


class NCCLBackend(Backend):
    """CUDA tensors over NVLink, PCIe or the network."""

    name: ClassVar[str] = "nccl"
    device_types: ClassVar[tuple[str, ...]] = ("cuda",)
    matches_tags: ClassVar[bool] = False

    @override
    def unavailable_reason(self) -> str | None:
        if not (dist.is_available() and dist.is_nccl_available()):
            return "this torch was built without NCCL. Install a CUDA wheel from pytorch.org."
        if not torch.cuda.is_available():
            return (
                "no CUDA device is visible. Check nvidia-smi and CUDA_VISIBLE_DEVICES, or train on "
                "CPUs with backend='gloo'."
            )
        return None
