"""A second copy of a buffer's shards inside each node, from a forward to its backward.

    shards              0 | 1 | 2 | 3     on 2 nodes of 2 ranks
    forward gathers     over 0 1 2 3      and each rank keeps a half of what has come
    backward gathers    over 0 1, 2 3     no element goes to another node

What is kept are the elements as they have come, before anything can edit them. It serves a backward
if no rank's shard is another by then; else the ranks gather from their shards.
Source: ZeRO++ (hpZ), arXiv:2306.10209, section 3.2; FSDP2's `reshard_after_forward` of a number.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.pending import Pending
from lightning_shard.core.layout import FlatLayout
from lightning_shard.data_parallel.content import content
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.torch_private import FakeTensor


class SecondaryShard:
    """This rank's part of a buffer's second copy.

    Args:
        layout: The buffer's, whose shards follow each other in it.
        node: The ranks of a node, neighbours, of which each has as many shards in its part.

    Attributes:
        serves: Whether full buffers are brought together from it now.
    """

    def __init__(self, layout: FlatLayout, node: Collectives) -> None:
        each = layout.num_shards // node.size
        numels = layout.shard_numels
        self._numels = [sum(numels[one * each : (one + 1) * each]) for one in range(node.size)]
        self._node, self.serves = node, False
        self._gathered_from: Tensor | None = None  # checksum of the shard
        self._kept: tuple[Tensor, Tensor] | None = None  # the part, and its shard's checksum

    @classmethod
    def of(cls, layout: FlatLayout, groups: DataGroups) -> "SecondaryShard | None":
        """Return one, or None where backward gathers from the shards themselves."""
        return None if groups.secondary is None else cls(layout, groups.secondary)

    @property
    def is_kept(self) -> bool:
        """Whether there is a part."""
        return self._kept is not None

    def num_bytes(self, full: Tensor) -> int:
        """Return the bytes of the part of a full buffer."""
        return self._numels[self._node.rank] * full.element_size()

    def note_gathered(self, shard: Tensor) -> None:
        """Note what the shard is that is sent to all ranks now."""
        self._gathered_from = content(shard)

    def keep(self, full: Tensor) -> None:
        """Keep this rank's part of a full buffer, (F,), that has just come from all shards."""
        assert self._gathered_from is not None
        part = torch.split(full, self._numels)[self._node.rank]
        self._kept = part.clone(), self._gathered_from

    def is_stale(self, shard: Tensor) -> Tensor:
        """Return whether the part is not there, or not that of the shard: shape (), uint8."""
        if self._kept is None:
            return torch.ones((), dtype=torch.uint8, device=shard.device)
        return (content(shard) != self._kept[1]).to(torch.uint8)

    def begin(self, full: Tensor) -> Pending:
        """Start bringing the node's parts together in `full`, (F,); the node's ranks must call."""
        assert self._kept is not None
        return self._node.all_gather(full, self._kept[0], sizes=self._numels, async_op=True)

    def forget(self) -> None:
        """Give the part back."""
        self._kept, self.serves = None, False


def agree_on_serving(shards: Sequence[tuple[SecondaryShard, Tensor]], ranks: Collectives) -> None:
    """Let second copies serve that belong to the shards of all ranks, each of which must call.

    Each comes with this rank's shard. A dry run's have no elements, and are what they were.
    """
    stale = torch.stack([one.is_stale(shard) for one, shard in shards])
    ranks.all_reduce(stale, "max").wait()
    known = not isinstance(stale, FakeTensor)
    unfit = stale.tolist() if known else [not one.is_kept for one, _ in shards]
    for (one, _), is_unfit in zip(shards, unfit, strict=True):
        one.serves = not is_unfit
