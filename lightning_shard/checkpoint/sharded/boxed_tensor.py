"""What one rank has of a full tensor: boxes of it, and memory for each.

torch.distributed.checkpoint asks any object with these three methods what it has and where that
lies; the protocol (`torch.distributed._checkpointable`) is what DTensor itself follows.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_shard.core.layout import Box, PlacedBox, boxes_of_range, placed_in, whole


class BoxedTensor:
    """Boxes of a full tensor, each with this rank's memory for it, possibly strided.

    No two boxes begin at the same element, here or on two ranks, unless they are the same.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, parts: Sequence[tuple[Box, Tensor]]
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.parts = {torch.Size(box.offsets): (box, tensor) for box, tensor in parts}

    def size(self) -> torch.Size:
        """Return the shape of the full tensor, which a loader compares with the saved one."""
        return self.shape

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """Return what there is to write, one item for each box."""
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return where the boxes lie."""
        return [
            ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(box.sizes))
            for offsets, (box, _) in self.parts.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the memory of the box that begins at the offsets of `index`."""
        assert index.offset is not None
        return self.parts[index.offset][1]


def boxed_range(
    flat: Tensor,
    start: int,
    shape: Sequence[int],
    places: Sequence[PlacedBox],
    full_shape: Sequence[int],
) -> BoxedTensor:
    """Return the boxes of a contiguous range of a rank's own tensor, by places in the full one."""
    boxes = boxes_of_range(start, start + flat.numel(), shape)
    if not flat.numel() and 0 in shape:  # the empty tensor has one empty box
        boxes = iter([whole(shape)])
    return BoxedTensor(full_shape, flat.dtype, list(_parts(flat, boxes, places)))


def _parts(
    flat: Tensor, boxes: Iterator[Box], places: Sequence[PlacedBox]
) -> Iterator[tuple[Box, Tensor]]:
    at = 0
    for box in boxes:
        tensor = flat[at : at + box.numel].view(box.sizes)
        at += box.numel
        if not box.numel:
            yield places[0].full, tensor
        for place in placed_in(box, places):
            yield place.full, _narrowed(tensor, box, place.local)


def _narrowed(tensor: Tensor, box: Box, part: Box) -> Tensor:
    for dim, (start, at, size) in enumerate(
        zip(box.offsets, part.offsets, part.sizes, strict=True)
    ):
        tensor = tensor.narrow(dim, at - start, size)
    return tensor
