"""The messages between two ranks: all of one size, so that a receive can be posted beforehand.

    int64   kind | received | version of a shard, N | which parameters | one shard, all buffers

    GRADIENT   the sender's gradient of the receiver's shard; the version of that shard with which
               it was computed; which parameters have a gradient
    SHARD      the sender's own shard, and its version
    LAST       the same, and nothing comes after it: ranks have agreed

`received` counts the messages of the receiver that the sender has taken: those need no memory any
more. CUDA tensors travel through the host: messages lie in CPU memory.
"""

from collections.abc import Sequence
from enum import IntEnum, auto

import torch
from torch import Tensor

from lightning_shard.backends.streams import sent_up
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters

_WORD = 8
_ALIGN = 16  # of the widest format


class Kind(IntEnum):
    """The kind of a message."""

    GRADIENT = auto()
    SHARD = auto()
    LAST = auto()


class Message:
    """One message, as views of its memory.

    Attributes:
        data: Shape (num_words,), int64, on the CPU.
        present: By parameter, over all buffers, whether it has a gradient; bytes.
        shards: One shard of each buffer, in the parameters' format.
    """

    def __init__(self, wire: "Wire", data: Tensor) -> None:
        self.data = data
        raw = data.view(torch.uint8)
        self._head = data[: 2 + wire.num_ranks]
        begin = _aligned(self._head.nbytes)
        self.present = raw[begin : begin + wire.num_params]
        self.shards = []
        begin += _aligned(wire.num_params)
        for flat in wire.flats:
            num_bytes = flat.shard.nbytes
            self.shards.append(raw[begin : begin + num_bytes].view(flat.shard.dtype))
            begin += _aligned(num_bytes)

    @property
    def kind(self) -> Kind:
        """The kind of the message."""
        return Kind(int(self.data[0]))

    @property
    def received(self) -> int:
        """Number of the receiver's messages that the sender had taken."""
        return int(self.data[1])

    @property
    def version(self) -> list[int]:
        """Version of the shard that the message is about."""
        version: list[int] = self._head[2:].tolist()
        return version

    def address(self, kind: Kind, received: int, version: Sequence[int]) -> None:
        """Fill in the head of the message."""
        self._head.copy_(torch.tensor([kind, received, *version]))


class Wire:
    """The layout of the shards of some buffers in a message.

    Args:
        flats: The flat buffers of parameters.
        num_ranks: Number of ranks that own shards of the buffers.

    Attributes:
        num_params: Number of parameters of all buffers.
        num_words: Length of a message in int64 words; the same on all ranks.
    """

    def __init__(self, flats: Sequence[FlatParameters], num_ranks: int) -> None:
        self.flats = flats
        self.num_ranks = num_ranks
        self.num_params = sum(len(flat.params) for flat in flats)
        sizes = [(2 + num_ranks) * _WORD, self.num_params, *(flat.shard.nbytes for flat in flats)]
        self.num_words = sum(map(_aligned, sizes)) // _WORD
        self._shard_slices = [
            [shard_slice for flat in flats for shard_slice in flat.layout.shard_slices(rank)]
            for rank in range(num_ranks)
        ]
        self._homes = [number for number, flat in enumerate(flats) for _ in flat.params]

    def new(self) -> Message:
        """Return a message without content."""
        return Message(self, torch.empty(self.num_words, dtype=torch.int64))

    @torch.no_grad()
    def gradient(self, grads: Sequence[Tensor | None], rank: int) -> Message:
        """Return a message with a rank's part of gradients, whose head is still to be filled.

        Args:
            grads: Gradient by parameter, over all buffers, in the parameters' own shapes.
            rank: Rank that owns the part.
        """
        message = self.new()
        flags = [int(grad is not None) for grad in grads]
        message.present.copy_(torch.tensor(flags, dtype=torch.uint8))
        parts = [
            shard if flat.full.device == shard.device else torch.empty_like(flat.shard)
            for shard, flat in zip(message.shards, self.flats, strict=True)
        ]
        for home, shard_slice, grad in zip(
            self._homes, self._shard_slices[rank], grads, strict=True
        ):
            if grad is not None and shard_slice.numel:
                part = grad.flatten()[shard_slice.param_offset : shard_slice.param_stop]
                parts[home][shard_slice.shard_offset : shard_slice.shard_stop].copy_(part)
        for shard, part in zip(message.shards, parts, strict=True):
            if part is not shard:
                shard.copy_(part)
        return message

    @torch.no_grad()
    def shard(self) -> Message:
        """Return a message with the own shard, whose head is still to be filled."""
        message = self.new()
        for target, flat in zip(message.shards, self.flats, strict=True):
            target.copy_(flat.shard)
        return message

    @torch.no_grad()
    def take_over(self, message: Message, rank: int) -> None:
        """Copy the shard in a message from its owner into the parameters held here."""
        for source, flat in zip(message.shards, self.flats, strict=True):
            flat.full[slice(*flat.layout.shard_bounds(rank))].copy_(source)

    def own_gradient(self, message: Message, rank: int) -> list[Tensor | None]:
        """Return the gradient in a message by parameter; None where it has no part here."""
        shards = [
            sent_up(shard, flat.full.device)
            for shard, flat in zip(message.shards, self.flats, strict=True)
        ]
        return [
            shards[home][shard_slice.shard_offset : shard_slice.shard_stop]
            if used and shard_slice.numel
            else None
            for home, shard_slice, used in zip(
                self._homes, self._shard_slices[rank], message.present.tolist(), strict=True
            )
        ]


def is_last(data: Tensor) -> bool:
    """Whether a message is the last of its sender."""
    return int(data[0]) == Kind.LAST


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
