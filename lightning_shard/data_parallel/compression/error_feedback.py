"""What a rank keeps of a buffer between two averages: what was not sent, and momentum.

    on its way   encoded  = residual + momentum'           momentum' = factor * momentum + gradient
    arrived      residual = residual + momentum' - sent    momentum  = momentum'

A sparse codec's momentum starts anew where it was sent. While a message travels everything stays
as it was; what has come of it is taken up once all ranks' values are known to be finite. So a step
in which one has an overflow leaves nothing behind, and of a tensor that no rank has values for
nothing changes.
Source: Deep Gradient Compression (momentum, masking), arXiv:1712.01887;
two-sided error compensation, arXiv:1905.05957.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_shard.backends.traffic import ring_share
from lightning_shard.data_parallel.compression.buffer import FlatBuffer
from lightning_shard.data_parallel.compression.compressor import State, if_sound


class ErrorFeedbackRules(Protocol):
    """What a codec says about what is kept; see `Codec`."""

    error_feedback: bool
    momentum: float
    sends_momentum: bool
    is_sparse: bool


class ErrorFeedback:
    """Residuals and momentum of one buffer; all values are of shape (ranks, segment), float32.

    Args:
        codec: Says what is kept.
        buffer: The buffer.
        factors: Of momentum, by tensor of the buffer; the same while a message travels.
    """

    def __init__(
        self, codec: ErrorFeedbackRules, buffer: FlatBuffer, factors: Sequence[float]
    ) -> None:
        self._codec = codec
        self._buffer = buffer
        self._factors = factors
        self._keeps_momentum = codec.momentum > 0 or codec.sends_momentum
        self.shares_momentum = codec.sends_momentum and not codec.is_sparse
        self._residual: Tensor | None = None  # these three once they are needed
        self._owner_residual: Tensor | None = None  # shape (segment,)
        self._momentum: Tensor | None = None

    def allocate(self) -> None:
        """Make what is kept; of frozen parameters that is nothing."""
        segment = self._buffer.segment_numel
        if self._codec.error_feedback and self._residual is None:
            self._residual = self._zeros(self._buffer.ranks.size, segment)
            if self._buffer.keeps_all:
                self._owner_residual = self._zeros(segment)
        if self._keeps_momentum and self._momentum is None:
            self._momentum = self._zeros(self._buffer.ranks.size, segment)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self._buffer.device)

    @property
    def tensors(self) -> list[Tensor]:
        """All that is kept."""
        kept = (self._residual, self._owner_residual, self._momentum)
        return [tensor for tensor in kept if tensor is not None]

    def with_kept(self, gradient: Tensor) -> Tensor:
        """What is to be sent for a gradient; changes nothing."""
        added = self._with_momentum(gradient)
        return added if self._residual is None else self._residual + added

    def _with_momentum(self, gradient: Tensor) -> Tensor:
        if self._momentum is None:
            return gradient
        added = self._momentum.clone()
        for places, factor in self._places_by_factor():
            gain = 1.0 - factor if self._codec.sends_momentum else 1.0
            added.view(-1)[places].mul_(factor).add_(gradient.view(-1)[places], alpha=gain)
        return added

    def _places_by_factor(self) -> Iterator[tuple[slice, float]]:
        """Where each factor of momentum holds: everywhere, if it is one."""
        if len(set(self._factors)) == 1:
            yield slice(None), self._factors[0]
            return
        for slot, factor in zip(self._buffer.layout.slots, self._factors, strict=True):
            yield slice(slot.offset, slot.stop), factor

    def take_up(
        self, gradient: Tensor, sent: Iterator[Tensor] | None, unused: Sequence[int], sound: Tensor
    ) -> None:
        """Keep what follows from a gradient that has been averaged.

        Args:
            gradient: As `with_kept` got it.
            sent: Segment by segment, what the others have got of it; None for all, as it was.
            unused: Tensors of the buffer that no rank has values for; of these nothing changes.
            sound: Whether anything does.
        """
        added = self._with_momentum(gradient)
        if self._residual is not None and sent is not None:
            rest = self._residual + added
            for index, segment in enumerate(sent):
                rest[index].sub_(segment)
                if self._momentum is not None and self._codec.is_sparse:
                    added[index].masked_fill_(segment != 0, 0.0)  # arXiv:1712.01887, section 3.2
            self._replace(self._residual, rest, unused, sound)
        if self._momentum is not None:
            self._replace(self._momentum, added, unused, sound)

    def _replace(self, kept: Tensor, new: Tensor, unused: Sequence[int], sound: Tensor) -> None:
        for index in unused:
            slot = self._buffer.layout.slots[index]
            place = slice(slot.offset, slot.stop)
            new.view(-1)[place] = kept.view(-1)[place]
        kept.copy_(if_sound(sound, new, kept))

    def with_owned(self, mean: Tensor) -> Tensor:
        """What the owner of a segment is to send for its average, shape (segment,)."""
        return mean if self._owner_residual is None else self._owner_residual + mean

    def take_up_owned(
        self, values: Tensor, sent: Tensor, unused: Sequence[int], sound: Tensor
    ) -> None:
        """Keep what follows from an average that the owner has sent.

        Args:
            values: What `with_owned` returned.
            sent: What the others have got of it.
            unused: As in `take_up`.
            sound: Whether anything changes.
        """
        if self._owner_residual is None:
            return
        rest, rank = values - sent, self._buffer.ranks.rank
        for index in unused:
            place = self._buffer.within(rank, index)
            rest[place] = self._owner_residual[place]
        self._owner_residual.copy_(if_sound(sound, rest, self._owner_residual))

    def go_on_from(
        self, average: Tensor, segment: int, unused: Sequence[int], sound: Tensor
    ) -> None:
        """Have the momentum of a segment be what has come of all ranks' momenta."""
        assert self._momentum is not None
        own, average = self._momentum[segment], average.clone()
        for index in unused:
            place = self._buffer.within(segment, index)
            average[place] = own[place]
        own.copy_(if_sound(sound, average, own))

    def share_momentum(self) -> int:
        """Have all ranks go on from one momentum at the end of a warm-up; each rank must call.

        Its average is what the average gradients would have made. Returns the bytes sent.
        """
        if not self.shares_momentum or self._momentum is None:
            return 0
        ranks = self._buffer.ranks
        ranks.all_reduce(self._momentum, "avg").wait()
        return ring_share(2 * self._momentum.numel(), ranks.size) * self._momentum.element_size()

    def state(self) -> State:
        """The averages over the ranks, by kind and tensor name; each rank must call."""
        ranks, kept = self._buffer.ranks, dict[str, Tensor]()
        if self._residual is not None:
            kept["residual"] = self._residual.clone()
        if self._momentum is not None:
            kept["momentum"] = self._momentum.clone()
        for full in kept.values():
            ranks.all_reduce(full, "avg").wait()
        if self._owner_residual is not None:
            owned = torch.empty_like(kept["residual"])
            ranks.all_gather(owned.view(-1), self._owner_residual).wait()
            kept["residual"] += owned
        return {kind: self._buffer.views(full.view(-1)) for kind, full in kept.items()}

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take up a state of any number of ranks; names that are not here are passed over."""
        if any(name in state.get(kind, {}) for kind in state for name in self._buffer.names):
            self.allocate()
        if self._owner_residual is not None:
            self._owner_residual.zero_()
        for kind, full in (("residual", self._residual), ("momentum", self._momentum)):
            if full is not None:
                self._load(full.zero_(), state.get(kind, {}))

    def _load(self, full: Tensor, tensors: Mapping[str, Tensor]) -> None:
        for name, view in self._buffer.views(full.view(-1)).items():
            if name in tensors:
                view.copy_(tensors[name])
