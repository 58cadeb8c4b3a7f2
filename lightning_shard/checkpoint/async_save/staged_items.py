"""A copy of what a rank writes, in host memory that serves again for the next save.

    ┌ weight ┬ bias ┬─ exp_avg ─┬ ...  one buffer, each tensor at a multiple of 64 bytes

Each copy has a storage of its own size over the buffer: a view would be written with all of it.
"""

import io
from collections.abc import Callable, Iterable, Iterator
from math import prod
from threading import Event
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from lightning_shard.checkpoint.host_buffers import HostBuffers

_ALIGNMENT = 64  # bytes


class SaveCancelledError(Exception):
    """What is raised in a writer whose save has been given up."""


class StagedItems:
    """What one rank writes, as it was when this was made.

    Args:
        items: What there is to write.
        resolve: Returns the tensor, or the pickled bytes, of an item.
        buffers: Lends the memory; see `give_back`.

    Attributes:
        num_bytes: Bytes of all copied tensors.
        num_written: Bytes of those that the writer has asked for.
        cancelled: Once set, the writer ends at the next item.
    """

    def __init__(
        self,
        items: Iterable[WriteItem],
        resolve: Callable[[WriteItem], Tensor | io.BytesIO],
        buffers: HostBuffers,
    ) -> None:
        self._items = list(items)
        resolved = {item.index: resolve(item) for item in self._items}
        tensors = {key: one.detach() for key, one in resolved.items() if isinstance(one, Tensor)}
        self.num_bytes = sum(map(_num_bytes, tensors.values()))
        self.num_written = 0
        self.cancelled = Event()
        self._buffers = buffers
        self._buffer: Tensor | None = buffers.lend(sum(map(_aligned_bytes, tensors.values())))
        self._staged: dict[MetadataIndex, Any] = {**resolved, **_copied(tensors, self._buffer)}

    def resolve_data(self, item: WriteItem) -> Any:
        """Return what the writer asks for; called by the writer's thread.

        Raises:
            SaveCancelledError: The save has been given up.
        """
        if self.cancelled.is_set():
            raise SaveCancelledError
        value = self._staged[item.index]
        if isinstance(value, Tensor):
            self.num_written += _num_bytes(value)
        return value

    def holds(
        self, items: Iterable[WriteItem], resolve: Callable[[WriteItem], Tensor | io.BytesIO]
    ) -> bool:
        """Whether other items are the same ones, bit by bit.

        Args:
            items: What there is to write.
            resolve: Returns the tensor, or the pickled bytes, of an item.
        """
        others = list(items)
        return others == self._items and all(
            _are_alike(self._staged[item.index], resolve(item)) for item in others
        )

    def give_back(self) -> None:
        """Let the next save have the memory; nothing reads it any more."""
        self._staged = {}
        if self._buffer is not None:
            self._buffers.give_back(self._buffer)
            self._buffer = None


def _are_alike(copy: Tensor | io.BytesIO, value: Tensor | io.BytesIO) -> bool:
    if isinstance(copy, Tensor) and isinstance(value, Tensor):
        return copy.dtype == value.dtype and torch.equal(_bits(copy), _bits(value.detach().cpu()))
    if isinstance(copy, io.BytesIO) and isinstance(value, io.BytesIO):
        return copy.getbuffer() == value.getbuffer()
    return False


def _bits(tensor: Tensor) -> Tensor:
    """Return the elements as bytes, in which those that are no numbers are alike, too."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _copied(tensors: dict[MetadataIndex, Tensor], buffer: Tensor) -> dict[MetadataIndex, Tensor]:
    """Return copies of tensors in a buffer, complete."""
    copies = dict(zip(tensors, _laid_out(tensors.values(), buffer), strict=True))
    for key, copy in copies.items():
        copy.copy_(tensors[key], non_blocking=True)
    for device in {one.device for one in tensors.values() if one.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _laid_out(tensors: Iterable[Tensor], buffer: Tensor) -> Iterator[Tensor]:
    memory, at = buffer.numpy(), 0
    for one in tensors:
        if one.layout is not torch.strided or not one.numel():
            yield torch.empty_like(one, device="cpu")
        else:
            flat = torch.frombuffer(memory, dtype=one.dtype, count=one.numel(), offset=at)
            yield flat.view(one.shape)
        at += _aligned_bytes(one)


def _num_bytes(tensor: Tensor) -> int:
    return prod(tensor.shape) * tensor.element_size()


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-_num_bytes(tensor) // _ALIGNMENT) * _ALIGNMENT
