"""A flat buffer that is averaged over ranks, as its exchange sees it.

values    [ slot ][ slot ]..[ slot ].......   . = gaps: alignment and padding, always zero
segments  |-- rank 0 --|-- rank 1 --|         one for each rank, all of one size
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.layout.flat import FlatLayout


@dataclass(frozen=True, kw_only=True)
class FlatBuffer:
    """A flat buffer: where its tensors lie and which ranks average it.

    Attributes:
        layout: Layout of the tensors; it has one shard, or one per rank.
        ranks: Group of the ranks that average the buffer.
        keeps_all: Whether each rank needs the full average, or its own segment only.
        number: Number that tells this buffer from the others of a model, for random streams.
        device: Device of the values.
        dense_itemsize: Bytes of a value that travels uncompressed.
    """

    layout: FlatLayout
    ranks: Collectives
    keeps_all: bool = True
    number: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dense_itemsize: int = 4

    @property
    def numel(self) -> int:
        """Number of elements of the whole buffer."""
        return self.layout.full_numel

    @property
    def segment_numel(self) -> int:
        """Number of elements of each rank's segment; all segments may be longer than the buffer."""
        return -(-self.numel // self.ranks.size)

    @property
    def dense_numel(self) -> int:
        """Number of elements that this rank would send for a dense average (ring model)."""
        once = self.segment_numel * (self.ranks.size - 1)
        return 2 * once if self.keeps_all else once

    @property
    def dense_bytes(self) -> int:
        """Bytes that this rank would send for a dense average (ring model)."""
        return self.dense_numel * self.dense_itemsize

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in buffer order."""
        return [slot.name for slot in self.layout.slots]

    @property
    def gaps(self) -> Iterator[slice]:
        """Slices of the buffer between and behind the tensors."""
        end = 0
        for slot in self.layout.slots:
            if slot.offset > end:
                yield slice(end, slot.offset)
            end = slot.stop
        if self.numel > end:
            yield slice(end, self.numel)

    def within(self, segment: int, slot: int) -> slice:
        """Return a tensor's slice within a segment, counted from the segment's beginning."""
        first, one = segment * self.segment_numel, self.layout.slots[slot]
        start, stop = (
            min(max(place - first, 0), self.segment_numel) for place in (one.offset, one.stop)
        )
        return slice(start, stop)

    def views(self, full: Tensor) -> dict[str, Tensor]:
        """Return each tensor by name, in its shape, as a view of `full`, (numel,) or longer."""
        slots = self.layout.slots
        return {slot.name: full[slot.offset : slot.stop].view(slot.shape) for slot in slots}
