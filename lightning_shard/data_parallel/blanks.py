"""Blanks: memory whose elements tell whether they were written, by a NaN that nothing computes.

While a module loads a checkpoint, its parameters are full and hold blanks. Elements that its own
hooks leave alone, all or some rows of a parameter, keep the value that the shards have.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_BLANKS = {  # by element: integers of the same size, and the bits of a quiet NaN with a payload
    torch.float64: (torch.int64, 0x7FF85A17E5A17E5A),
    torch.float32: (torch.int32, 0x7FC5A17E),
    torch.bfloat16: (torch.int16, 0x7FC5),
    torch.float16: (torch.int16, 0x7E5A),
}


def blank(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make a tensor of blanks on the CPU; of zeros in a format that has no blanks."""
    real = dtype.to_real() if dtype.is_complex else dtype
    if real not in _BLANKS:
        return torch.zeros(shape, dtype=dtype)
    whole_numbers, bits = _BLANKS[real]
    if dtype.is_complex:
        parts = torch.full((*shape, 2), bits, dtype=whole_numbers).view(real)
        return torch.view_as_complex(parts)
    return torch.full(tuple(shape), bits, dtype=whole_numbers).view(real)


def is_blank(values: Tensor) -> Tensor:
    """Return by element whether it is still blank; shaped as `values`."""
    if values.is_complex():
        return is_blank(torch.view_as_real(values)).all(-1)
    if values.dtype not in _BLANKS:
        return torch.zeros(values.shape, dtype=torch.bool, device=values.device)
    whole_numbers, bits = _BLANKS[values.dtype]
    return values.contiguous().view(whole_numbers) == bits


def overwrite(view: Tensor, value: Tensor) -> None:
    """Write a tensor over another of its shape, all but its blanks."""
    kept = is_blank(value)
    if kept.any():
        value = torch.where(kept, view.to(value), value)
    view.copy_(value)
