"""Views of a flat tensor: the parameters' own shapes in a full one, 1-D shards in a rank's part."""

from torch import Tensor

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
