"""Memory of any size that takes none, as long as nobody touches it.

A tensor over it is pickled with its shape, and its elements come later, from elsewhere.
"""

import mmap
import sys

import torch
from torch import Tensor

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, unknown to Python 3.11


def untouched(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor on the CPU whose elements nobody may look at."""
    num_bytes = shape.numel() * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, num_bytes, flags=flags)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
