"""The device: torch is told of a backend that is written in Python, and gets tensors from a mode.

Its tensors are torch's fake ones: they know shape, format, device, strides and which storage they
share. Autograd runs their backward on a thread of the device, as on a GPU and unlike on the CPU.

With GPU_LIKE_DEVICE=cuda it is CUDA's device, whose tensors are fake, too: autograd asks CUDA for
its thread, so that there must be a GPU, but nothing is computed on it.
"""

import os
from typing import Any

import torch
from torch.utils import backend_registration

NAME = os.environ.get("GPU_LIKE_DEVICE", "gpulike")


class DeviceModule:
    """What torch finds as `torch.gpulike`."""

    def is_initialized(self) -> bool:
        """Whether the device is ready."""
        return True

    def is_available(self) -> bool:
        """Whether there is a device."""
        return True

    def current_device(self) -> int:
        """Return the number of the device in use."""
        return 0

    def set_device(self, device: Any) -> None:
        """Do nothing: there is one device."""

    def device_count(self) -> int:
        """Return the number of devices."""
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        """Do nothing: random numbers have no elements."""

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: random numbers have no elements."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return the state of a generator that is never drawn from."""
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Do nothing."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the formats that autocast may compute in."""
        return [torch.float16, torch.bfloat16]


def register() -> torch.device:
    """Tell torch of the device, for as long as this process lives; return it."""
    if NAME != "cuda":
        backend_registration._setup_privateuseone_for_python_backend(NAME, DeviceModule())
    return torch.device(NAME, 0)


def is_here(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies on the device."""
    return tensor.device.type == NAME
