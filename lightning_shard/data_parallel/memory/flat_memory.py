"""The memory of flat buffers: the backend chooses it, so that ranks reach what moves often best.

Blanks are memory whose elements tell whether they were written, by a NaN that nothing computes.
While a module loads a checkpoint, its parameters are full and hold blanks: elements that its own
hooks leave alone keep the value that the shards have.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.layout import FlatLayout

_BLANKS = {  # by element: integers of the same size, and the bits of a quiet NaN with a payload
    torch.float64: (torch.int64, 0x7FF85A17E5A17E5A),
    torch.float32: (torch.int32, 0x7FC5A17E),
    torch.bfloat16: (torch.int16, 0x7FC5),
    torch.float16: (torch.int16, 0x7E5A),
}


def full_views(full: Tensor, layout: FlatLayout) -> list[Tensor]:
    """Return the full-shaped view of each slot of a full-sized flat tensor."""
    parts = full.split_with_sizes(layout.part_numels)[1::2]
    return [part.view(slot.shape) for part, slot in zip(parts, layout.slots, strict=True)]


def shard_views(shard: Tensor, layout: FlatLayout, index: int) -> list[Tensor]:
    """Return one rank's 1-D part of each slot, possibly empty, in its shard, shape (S,)."""
    return [shard[part.shard_offset : part.shard_stop] for part in layout.shard_slices(index)]


class FlatMemory:
    """Makes flat buffers that the operations of a group move."""

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks

    def like(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a buffer of as many elements as another, with any content."""
        return self._ranks.new_empty(flat, flat.numel(), dtype)

    def zeros(self, like: Tensor, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer of zeros, of the kind of tensor that `like` is."""
        return self._ranks.new_empty(like, numel, dtype, device).zero_()

    def copy(self, flat: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of a buffer, in another format if one is given."""
        return self.like(flat, dtype or flat.dtype).copy_(flat)


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
