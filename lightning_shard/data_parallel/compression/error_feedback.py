"""The values that a rank keeps of a buffer between two averages: residuals and momentum.

    on its way   encoded  = residual + momentum'           momentum' = factor * momentum + gradient
    arrived      residual = residual + momentum' - sent    momentum  = momentum'

A sparse codec's momentum starts anew where it was sent. While a message travels everything stays
as it was; the kept values change once all ranks' values are known to be finite. So a step in which
one rank overflows leaves nothing behind, and nothing changes of a tensor that no rank has values
for.
Source: Deep Gradient Compression (momentum, masking), arXiv:1712.01887;
two-sided error compensation, arXiv:1905.05957.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_shard.backends.traffic import ring_share
from lightning_shard.data_parallel.compression.compressor import FlatBuffer, State, if_sound

_GAPS = "_gaps"  # of a kind of kept values: those that belong to no tensor


class ErrorFeedbackRules(Protocol):
    """The options of a codec that decide which values are kept; see `Codec`."""

    error_feedback: bool
    momentum: float
    sends_momentum: bool
    is_sparse: bool


class ErrorFeedback:
    """Residuals and momentum of one buffer; all values are of shape (ranks, segment), float32.

    Args:
        codec: Codec whose options decide which values are kept.
        buffer: The buffer that is averaged.
        factors: Factor of momentum by tensor of the buffer; the same while a message travels.
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
        """Allocate the kept values; none for frozen parameters."""
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
        """All tensors of kept values."""
        kept = (self._residual, self._owner_residual, self._momentum)
        return [tensor for tensor in kept if tensor is not None]

    def with_kept(self, gradient: Tensor) -> Tensor:
        """Return the values to send for a gradient, with the kept ones; changes nothing."""
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
        """Yield the slices of the buffer with their factor of momentum; one for a common factor."""
        if len(set(self._factors)) == 1:
            yield slice(None), self._factors[0]
            return
        for slot, factor in zip(self._buffer.layout.slots, self._factors, strict=True):
            yield slice(slot.offset, slot.stop), factor

    def take_up(
        self, gradient: Tensor, sent: Iterator[Tensor] | None, unused: Sequence[int], sound: Tensor
    ) -> None:
        """Update the kept values after a gradient has been averaged.

        Args:
            gradient: The gradient that `with_kept` was given.
            sent: The decoded values that the other ranks got, by segment; None where they got
                everything exactly.
            unused: Indices of tensors that no rank has values for; their kept values do not change.
            sound: Whether all ranks' values were finite, a bool scalar; else nothing changes.
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
        """Return the values that a segment's owner sends for its average, shape (segment,)."""
        return mean if self._owner_residual is None else self._owner_residual + mean

    def take_up_owned(
        self, values: Tensor, sent: Tensor, unused: Sequence[int], sound: Tensor
    ) -> None:
        """Update the owner's kept values after it has sent an average.

        Args:
            values: The values that `with_owned` returned.
            sent: The decoded values that the other ranks got.
            unused: Indices of tensors that no rank has values for; their kept values do not change.
            sound: Whether all ranks' values were finite, a bool scalar; else nothing changes.
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
        """Set the momentum of a segment to the average of all ranks' momenta that has come."""
        assert self._momentum is not None
        own, average = self._momentum[segment], average.clone()
        for index in unused:
            place = self._buffer.within(segment, index)
            average[place] = own[place]
        own.copy_(if_sound(sound, average, own))

    def share_momentum(self) -> int:
        """Have all ranks go on from one momentum at the end of a warm-up; each rank must call.

        The average momentum is that of the average gradients. Returns the bytes sent.
        """
        if not self.shares_momentum or self._momentum is None:
            return 0
        ranks = self._buffer.ranks
        ranks.all_reduce(self._momentum, "avg").wait()
        return ring_share(2 * self._momentum.numel(), ranks.size) * self._momentum.element_size()

    def own_state(self) -> State:
        """Return what this rank keeps; of the averages that it owns, only what lies in them.

        What decoding has left between the tensors is kept, too: it is in the scales of blocks.
        """
        own: State = {}
        for kind, flat, places in self._own_parts():
            own[kind] = {name: flat[one] for name, one in places.items()}
            if gaps := _gaps(flat, places):
                own[kind + _GAPS] = {self._buffer.names[0]: torch.cat([flat[one] for one in gaps])}
        for kind in ("residual", "momentum"):
            for slot in self._buffer.layout.slots if kind in own else ():
                own[kind][slot.name] = own[kind][slot.name].view(slot.shape)
        return own

    def load_own(self, own: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over what `own_state` has returned on this rank; the buffers must be the same."""
        for kind, flat, places in self._own_parts():
            for name, place in places.items():
                if name in own.get(kind, {}):
                    flat[place] = own[kind][name].flatten()
            between = own.get(kind + _GAPS, {}).get(self._buffer.names[0])
            gaps = _gaps(flat, places)
            if between is not None and between.numel() == sum(one.stop - one.start for one in gaps):
                for gap, values in zip(gaps, _cut(between, gaps), strict=True):
                    flat[gap] = values

    def _own_parts(self) -> Iterator[tuple[str, Tensor, dict[str, slice]]]:
        """Yield each kind of kept values: the flat tensor, and where in it tensors lie by name."""
        buffer = self._buffer
        slots = {slot.name: slice(slot.offset, slot.stop) for slot in buffer.layout.slots}
        for kind, full in (("residual", self._residual), ("momentum", self._momentum)):
            if full is not None:
                yield kind, full.view(-1), slots
        if self._owner_residual is not None:
            owned = {
                name: buffer.within(buffer.ranks.rank, index)
                for index, name in enumerate(buffer.names)
            }
            there = {name: place for name, place in owned.items() if place.stop > place.start}
            yield "owned", self._owner_residual, there

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over a state of any number of ranks; names that are not here are passed over."""
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


def _gaps(flat: Tensor, places: Mapping[str, slice]) -> list[slice]:
    """Return the places of a flat tensor before, between and behind those of named tensors."""
    ends = [0, *(place.stop for place in places.values())]
    starts = [*(place.start for place in places.values()), flat.numel()]
    between = zip(ends, starts, strict=True)
    return [slice(end, start) for end, start in between if start > end]


def _cut(values: Tensor, places: Sequence[slice]) -> Sequence[Tensor]:
    return torch.split(values, [place.stop - place.start for place in places])
