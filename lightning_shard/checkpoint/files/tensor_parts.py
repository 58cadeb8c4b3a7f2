"""The bytes of a tensor's elements, a few megabytes at a time; and tensors that have none yet.

Such a tensor is pickled with its shape, and its elements come later, from elsewhere. Its memory, of
any size, takes none as long as nobody touches it.
"""

import mmap
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

PART_BYTES = 4 << 20
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, unknown to Python 3.11


def parts_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor's elements in order, without a copy where they lie so.

    Args:
        tensor: On any device, with any strides.
    """
    if tensor.is_contiguous():
        flat = tensor.view(-1).view(torch.uint8)
        step = max(1, flat.numel()) if flat.is_cpu else PART_BYTES
        for first in range(0, flat.numel(), step):
            yield flat[first : first + step].cpu().numpy().data
    elif tensor.nbytes <= PART_BYTES:
        yield from parts_of(tensor.contiguous())
    elif tensor[0].nbytes > PART_BYTES:
        for row in tensor:
            yield from parts_of(row)
    else:
        num_rows = PART_BYTES // tensor[0].nbytes
        for first in range(0, len(tensor), num_rows):
            yield from parts_of(tensor[first : first + num_rows])


def untouched(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor on the CPU whose elements nobody may look at."""
    num_bytes = shape.numel() * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = mmap.mmap(-1, num_bytes, flags=flags)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
