"""The memory of flat buffers: the backend chooses it, so that ranks reach what moves often best.

On shared memory peers read parameters and gradients in place; elsewhere this is ordinary memory.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.layout.flat import FlatLayout


def full_views(full: Tensor, layout: FlatLayout) -> list[Tensor]:
    """Return the full-shaped view of each slot of a full-sized flat tensor."""
    parts = full.split_with_sizes(layout.part_numels)[1::2]
    return [part.view(slot.shape) for part, slot in zip(parts, layout.slots, strict=True)]


def shard_views(shard: Tensor, layout: FlatLayout, index: int) -> list[Tensor]:
    """Return one rank's 1-D part of each slot, possibly empty.

    Args:
        shard: Shape (S,), that rank's part of a full-sized flat tensor.
        layout: How the full tensor is laid out and cut.
        index: Number of the shard.
    """
    return [shard[part.shard_offset : part.shard_stop] for part in layout.shard_slices(index)]


class FlatMemory:
    """Makes flat buffers that the operations of a group move.

    Args:
        ranks: The group that shards the state.
    """

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

    def set_aside(self, flat: Tensor, let_go: Callable[[], None]) -> bool:
        """Let others have a buffer's memory until `take_up`; see `Collectives.set_aside`."""
        return self._ranks.set_aside(flat, let_go)

    def take_up(self, flat: Tensor) -> None:
        """Use a buffer again that was set aside."""
        self._ranks.take_up(flat)
