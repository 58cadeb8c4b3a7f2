"""A checkpoint's file, some of whose tensors come together while it is written.

    tensors without elements        on torch's "meta" device, in the checkpoint
    pickle                          first in the file: it has shapes and numbers, no elements
    elements                        the rank that writes has its own where they lie, and those of
                                    other ranks as they arrive

So the rank that writes holds a few megabytes of them. While it is pickled, such a tensor has memory
of its full size that nobody touches, and that takes none.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.arriving import ArrivingTensor
from lightning_shard.checkpoint.files.torch_archive import Record, records_of
from lightning_shard.checkpoint.files.untouched import untouched
from lightning_shard.errors import CheckpointError

Place = tuple[object, ...]  # of a tensor, the same on all ranks
Arriving = Iterator[tuple[Place, ArrivingTensor]]


class StreamedFile:
    """What one save writes; each rank must make one, with the same sources in the same order."""

    def __init__(self) -> None:
        self._awaited: dict[Place, Tensor] = {}  # without elements
        self._sources: list[Arriving] = []
        self._tensors: Arriving = chain.from_iterable(self._sources)  # also those added later

    def await_tensor(self, place: Place, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor without elements for the checkpoint; of one place it is the same."""
        if place not in self._awaited:
            self._awaited[place] = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return self._awaited[place]

    def add_source(self, tensors: Arriving) -> None:
        """Add tensors that come together in turn: each rank must run through them."""
        self._sources.append(tensors)

    def records(self, checkpoint: Mapping[str, Any]) -> Iterator[Record]:
        """Yield what is written of a checkpoint, in order, on the rank that writes.

        Other ranks call `finish` meanwhile.

        Raises:
            CheckpointError: The elements of a tensor do not come, or others than were awaited.
        """
        with self._pickled(checkpoint) as (records, places):
            awaited = dict[Place, Record]()
            for record in records:
                place = places.get(_address(record.content))
                if place is not None:
                    awaited[place] = record
                elif record.name == ".format_version" and places:  # 1 would be: they lie in order
                    yield record._replace(content=b"0")
                else:
                    yield record
        for place, tensor in self._tensors:
            if place in awaited:
                yield _filled(awaited.pop(place), tensor)
        if awaited:
            raise CheckpointError(
                f"Nothing was saved: nobody has the elements of {sorted(map(str, awaited))}, "
                f"expected those of {len(self._awaited)} tensors. Save between two steps."
            )

    def finish(self) -> None:
        """Bring together what is left, for the ranks that wait for it; each rank must call."""
        for _ in self._tensors:
            pass

    @contextmanager
    def _pickled(
        self, checkpoint: Mapping[str, Any]
    ) -> Iterator[tuple[list[Record], dict[int, Place]]]:
        """Return a checkpoint's records, and by address the places of those without elements."""
        memory = {
            place: untouched(tensor.shape, tensor.dtype) for place, tensor in self._awaited.items()
        }
        places = {_address(one.untyped_storage()): place for place, one in memory.items()}
        places.pop(0, None)
        pairs = [(tensor, memory[place]) for place, tensor in self._awaited.items()]
        _swap(pairs)
        try:
            records = records_of(checkpoint)
        finally:
            _swap(pairs)
        yield records, places


def _swap(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for one, other in pairs:
        torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]


def _address(content: object) -> int:
    return content.data_ptr() if isinstance(content, torch.UntypedStorage) else 0


def _filled(record: Record, tensor: ArrivingTensor) -> Record:
    """Return a record with its elements, which come while it is written."""
    if tensor.num_bytes != record.num_bytes:
        raise CheckpointError(
            f"Nothing was saved: {record.name} has come as {tuple(tensor.shape)} of "
            f"{tensor.dtype}, expected {record.num_bytes} bytes. Save between two steps."
        )
    return record._replace(content=(part.cpu().numpy().data for part in tensor.parts))
