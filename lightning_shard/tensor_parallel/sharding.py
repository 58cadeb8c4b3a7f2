"""The split of one parameter over the ranks of a tensor-parallel group: pure arithmetic.

    blocks=(8,)      [ 0 0 0 0 | 1 1 1 1 ]
    blocks=(4, 4)    [ 0 0 | 1 1 | 0 0 | 1 1 ]        rank 1's local tensor: [ 1 1 1 1 ]

A fused matrix consists of blocks that are each cut evenly, such as query, key and value.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_shard.core.layout import Box, PlacedBox
from lightning_shard.errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The split of one parameter."""

    dim: int
    blocks: tuple[int, ...]
    num_shards: int

    def __post_init__(self) -> None:
        """Refuse an uneven cut."""
        uneven = [block for block in self.blocks if block % self.num_shards]
        if uneven:
            common = [
                n
                for n in range(2, min(self.blocks) + 1)
                if all(block % n == 0 for block in self.blocks)
            ]
            fitting = f"one of {', '.join(map(str, common))}" if common else "1"
            raise LayoutError(
                f"{uneven[0]} elements along dimension {self.dim} cannot be split evenly over "
                f"{self.num_shards} ranks; expected a tensor_parallel_size that is {fitting}."
            )

    @property
    def local_blocks(self) -> tuple[int, ...]:
        """Sizes along `dim` of the blocks on each rank."""
        return tuple(block // self.num_shards for block in self.blocks)

    def local_shape(self, full_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of each rank's shard of a tensor of `full_shape`."""
        shape = list(full_shape)
        shape[self.dim] = sum(self.local_blocks)
        return tuple(shape)

    def shard(self, full: Tensor, index: int) -> Tensor:
        """Return rank `index`'s shard, contiguous and in memory of its own."""
        blocks = full.split(self.blocks, dim=self.dim)  # type: ignore[no-untyped-call]
        own = [block.chunk(self.num_shards, dim=self.dim)[index] for block in blocks]
        return torch.cat(own, dim=self.dim).contiguous()

    def places(self, local_shape: Sequence[int], index: int) -> list[PlacedBox]:
        """Return where the blocks of rank `index`'s shard lie in the full tensor."""
        places, local_start, full_start = [], 0, 0
        for block, size in zip(self.blocks, self.local_blocks, strict=True):
            at, sizes = [0] * len(local_shape), list(local_shape)
            at[self.dim], sizes[self.dim] = local_start, size
            full = [*at]
            full[self.dim] = full_start + index * size
            places.append(PlacedBox(Box(tuple(at), tuple(sizes)), tuple(full)))
            local_start, full_start = local_start + size, full_start + block
        return places

    def assemble(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the full tensor from every rank's shard, in rank order."""
        split = [
            shard.split(self.local_blocks, dim=self.dim)  # type: ignore[no-untyped-call]
            for shard in shards
        ]
        return torch.cat(
            [part for block in zip(*split, strict=True) for part in block], dim=self.dim
        )
