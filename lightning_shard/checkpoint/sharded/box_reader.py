"""Reading the elements of a box straight into their place, and those that are asked for alone.

    file    ... ┌ archive of one box: head │ elements │ tail ┐ ...
                                             ├──────┤           what this rank needs of it

torch's own reader makes a tensor of the whole box first, which may be much more than a rank needs
of it. Where the head is the one that is written of a box of this shape, the elements lie in order
behind it. Where it is another (somebody's own format, strides), torch's reader reads the box.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from typing_extensions import override

from lightning_shard.checkpoint.files.tensor_parts import PART_BYTES
from lightning_shard.checkpoint.sharded.box_writer import (
    bytes_before_elements,
    is_plain,
)
from lightning_shard.checkpoint.sharded.index import IndexedReader


class BoxReader(IndexedReader):
    """Reads a folder whose index was read before; holds a few megabytes beside what it fills."""

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        left: list[ReadItem] = []
        for path, items in self._by_file(plan.items):
            with self.fs.create_stream(self.fs.concat_path(self.path, path), "rb") as file:
                left += [item for item in items if not self._read(file, item, planner)]
        return super().read_data(replace(plan, items=left), planner)

    def _by_file(self, items: Sequence[ReadItem]) -> Iterator[tuple[str, list[ReadItem]]]:
        """Yield the items of each file, in the order in which they lie there."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in sorted(items, key=lambda one: self.storage_data[one.storage_index].offset):
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        yield from by_file.items()

    def _read(self, file: Any, item: ReadItem, planner: LoadPlanner) -> bool:
        """Read an item, if its elements lie in order; return whether it was."""
        place, stored = self.storage_data[item.storage_index], self._box(item.storage_index)
        if stored is None or place.transform_descriptors:
            return False
        shape, dtype = stored
        target = planner.resolve_tensor(item)
        if not is_plain(target) or target.shape != item.lengths or not target.numel():
            return False
        head = bytes_before_elements(shape, dtype)
        file.seek(place.offset)
        if file.read(len(head)) != head:
            return False
        read_part(file, place.offset + len(head), shape, dtype, item.storage_offsets, target)
        planner.commit_tensor(item, target)
        return True

    def _box(self, index: MetadataIndex) -> tuple[torch.Size, torch.dtype] | None:
        """Return shape and format of a stored box, as the index tells them; None for no tensor."""
        entry = self._index.state_dict_metadata[index.fqn]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        chunks = [one for one in entry.chunks if one.offsets == index.offset]
        return (chunks[0].sizes, entry.properties.dtype) if len(chunks) == 1 else None


@torch.no_grad()
def read_part(
    file: Any,
    begin: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    offsets: Sequence[int],
    target: Tensor,
) -> None:
    """Read a part of a box that lies contiguous in a file.

    Args:
        file: Binary and seekable.
        begin: Where in the file the box begins.
        shape: Shape of the box.
        dtype: Format of the box.
        offsets: Where in the box the part begins.
        target: What the part is read into; it has its shape.

    Raises:
        OSError: The file is too short.
    """
    if not shape:
        shape, offsets, target = (1,), (0,), target.view(1)
    row_bytes = prod(shape[1:]) * dtype.itemsize
    begin += offsets[0] * row_bytes
    lies_so = target.is_contiguous() and target.is_cpu and target.dtype == dtype
    if lies_so and target.shape[1:] == torch.Size(shape[1:]):
        _fill(file, begin, target)
    elif row_bytes > PART_BYTES:
        for number, row in enumerate(target):
            read_part(file, begin + number * row_bytes, shape[1:], dtype, offsets[1:], row)
    else:
        columns = [
            slice(first, first + size)
            for first, size in zip(offsets[1:], target.shape[1:], strict=True)
        ]
        num_rows = PART_BYTES // row_bytes
        for first in range(0, len(target), num_rows):
            rows = target[first : first + num_rows]
            read = torch.empty((len(rows), *shape[1:]), dtype=dtype)
            _fill(file, begin + first * row_bytes, read)
            rows.copy_(read[(slice(None), *columns)])


def _fill(file: Any, begin: int, tensor: Tensor) -> None:
    memory = tensor.detach().view(-1).view(torch.uint8).numpy().data
    file.seek(begin)
    done = 0
    while done < len(memory):
        count = file.readinto(memory[done:])
        if not count:
            raise OSError(f"it ends {len(memory) - done} bytes before the end of a tensor")
        done += count
