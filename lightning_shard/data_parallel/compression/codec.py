"""A codec encodes values in fewer bytes and decodes them: all that a new compression needs.

    class Sign(Codec):
        error_feedback = True

        def encode(self, values, turn):
            return values.abs().mean()[None], values >= 0

        def decode(self, fields, numel):
            scale, positive = fields
            return torch.where(positive, scale, -scale)

A buffer is averaged through a codec so; every message is small, every sum is in float32.

            begin                          proceed                        wait
    rank 0  [a0|a1] ─encode─┐   a0+b0 ─mean, encode─┐   [ab0|ab1]
                        all-to-all              all-gather
    rank 1  [b0|b1] ─encode─┘   a1+b1 ─mean, encode─┘   [ab0|ab1]

A rank that needs its own segment only stops before the second encoding. All ranks decode the same
bytes, so they hold the same bits. Whether all values were finite travels along.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.backends.pending import Pending
from lightning_shard.backends.streams import sent_up
from lightning_shard.backends.traffic import ring_share
from lightning_shard.data_parallel.compression.compressor import (
    Compressor,
    Exchange,
    FlatBuffer,
    State,
    Turn,
    if_sound,
    scale_up,
)
from lightning_shard.errors import ConfigError


class Codec(Compressor):
    """Makes values smaller by itself, one rank's segment at a time.

    Attributes:
        error_feedback: Whether the values that encoding has lost are kept and added the next time
            (arXiv:1809.07599).
        momentum: Factor of the momentum m that is added up before sending, m = momentum * m + g
            (arXiv:1712.01887); the optimizer must then have none. 0 for no momentum.
        sends_momentum: Whether Adam's momentum travels, an average over steps with the optimizer's
            factor, and Adam's second moment is frozen after the warm-up.
        update_limit: Greatest change of a value in a step under a frozen second moment, in
            learning rates.
        is_sparse: Whether most values decode to zero. With error feedback, momentum then starts
            anew where a value was sent. Adam's momentum under other codecs goes on from the
            average of all ranks', where each rank gets it (stage 0).
    """

    error_feedback: bool = False
    momentum: float = 0.0
    sends_momentum: bool = False
    update_limit: float = 1.0
    is_sparse: bool = False

    @property
    @override
    def freezes_variance(self) -> bool:
        return self.sends_momentum

    @property
    @override
    def keeps(self) -> bool:
        return self.error_feedback or self.momentum > 0 or self.sends_momentum

    @abstractmethod
    def encode(self, values: Tensor, turn: Turn) -> Sequence[Tensor]:
        """Make `values` smaller.

        Args:
            values: Shape (n,), float32, finite; must not be changed.
            turn: The step, the random seed and the number of summed ranks.

        Returns:
            Tensors whose types and shapes depend on n, the step and `turn.num_summed` alone.
        """

    @abstractmethod
    def decode(self, fields: Sequence[Tensor], numel: int) -> Tensor:
        """Make values, shape (numel,), float32, of what `encode` returned."""

    def is_dense(self, step: int) -> bool:
        """Whether this step is a warm-up in which nothing is compressed."""
        return False

    @override
    def exchange(self, buffer: FlatBuffer) -> Exchange:
        return CodecExchange(self, buffer)


_GAPS = "_gaps"  # of a kind of kept values: those that belong to no tensor


class _ErrorFeedback:
    """The values that a rank keeps of a buffer between two averages: residuals and momentum.

        on its way  encoded  = residual + momentum'         momentum' = factor * momentum + gradient
        arrived     residual = residual + momentum' - sent  momentum  = momentum'

    A sparse codec's momentum starts anew where it was sent. The kept values change once all ranks'
    values are known to be finite, so that a step in which one rank overflows leaves nothing behind.
    All are of shape (ranks, segment), float32.
    Source: arXiv:1712.01887 (momentum, masking), arXiv:1905.05957 (two-sided error compensation).

    Args:
        factors: Factor of momentum by tensor of the buffer; the same while a message travels.
    """

    def __init__(self, codec: "Codec", buffer: FlatBuffer, factors: Sequence[float]) -> None:
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
        """Update the owner's kept values after it has sent an average."""
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
        """Have all ranks go on from their average momentum; each must call. Returns bytes sent."""
        if not self.shares_momentum or self._momentum is None:
            return 0
        ranks = self._buffer.ranks
        ranks.all_reduce(self._momentum, "avg").wait()
        return ring_share(2 * self._momentum.numel(), ranks.size) * self._momentum.element_size()

    def own_state(self) -> State:
        """Return what this rank keeps; of the averages that it owns, only what lies in them."""
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
            sizes = [gap.stop - gap.start for gap in gaps]
            if between is not None and between.numel() == sum(sizes):
                for gap, values in zip(gaps, torch.split(between, sizes), strict=True):
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
                tensors = state.get(kind, {})
                for name, view in self._buffer.views(full.zero_().view(-1)).items():
                    if name in tensors:
                        view.copy_(tensors[name])


def _gaps(flat: Tensor, places: Mapping[str, slice]) -> list[slice]:
    """Return the places of a flat tensor before, between and behind those of named tensors."""
    ends = [0, *(place.stop for place in places.values())]
    starts = [*(place.start for place in places.values()), flat.numel()]
    between = zip(ends, starts, strict=True)
    return [slice(end, start) for end, start in between if start > end]


_ROW_ALIGN = 8  # of the widest type, so that each field can be seen in its own


class _Field(NamedTuple):
    """One tensor in a row of bytes, from `start` to `stop`."""

    dtype: torch.dtype
    shape: torch.Size
    start: int
    stop: int


class _Form(NamedTuple):
    """The layout of several tensors as one row of bytes, so that one message carries them.

        | sound | field 0 ... | field 1 ... |      each begins at a multiple of 8 bytes

    `sound` says whether the values were finite. A codec need not be able to say so.
    """

    fields: tuple[_Field, ...]
    num_bytes: int


def form_of(tensors: Sequence[Tensor]) -> _Form:
    """Return the form of a row that holds these tensors one behind the other."""
    fields, end = [], _ROW_ALIGN
    for tensor in tensors:
        fields.append(_Field(tensor.dtype, tensor.shape, end, end + tensor.nbytes))
        end = -(-fields[-1].stop // _ROW_ALIGN) * _ROW_ALIGN
    return _Form(tuple(fields), end)


def write_row(row: Tensor, form: _Form, tensors: Sequence[Tensor], sound: Tensor) -> None:
    """Fill `row`, shape (num_bytes,) of uint8; `sound` is a scalar of bool."""
    row[0].copy_(sound)
    for field, tensor in zip(form.fields, tensors, strict=True):
        row[field.start : field.stop].copy_(tensor.contiguous().view(-1).view(torch.uint8))


def read_row(row: Tensor, form: _Form) -> tuple[Tensor, ...]:
    """Return the tensors that a row holds, as views of it."""
    return tuple(
        row[field.start : field.stop].view(field.dtype).view(field.shape) for field in form.fields
    )


def all_sound(rows: Tensor) -> Tensor:
    """Return whether all rows' values, (R, num_bytes), were finite: a bool scalar."""
    return (rows[:, 0] != 0).all()


_SEED_FACTORS = (1_000_003, 8_191, 2_053, 257)  # primes, for mixing counters into a seed


@dataclass(eq=False, kw_only=True)
class _Travel:
    """One average on its way.

    Attributes:
        scale: The loss scale that was in the values, if there was one.
        gradient: This rank's values, shape (W, segment); None where nothing of them is kept.
        sent: The encoded values, shape (W, num_bytes), one row for each rank.
        rows: The received rows, shape (W, num_bytes): this segment's values, then all averages.
        owned: In the second half, the values that this rank sends as its segment's average.
        owned_row: The encoded `owned`, held while it travels.
    """

    out: Tensor
    scale: Tensor | None
    gradient: Tensor | None
    sent: Tensor
    sent_form: _Form
    rows: Tensor
    form: _Form
    pending: Pending
    owned: Tensor | None = None
    owned_row: Tensor | None = None


class CodecExchange(Exchange):
    """Averages one buffer through a codec."""

    def __init__(self, codec: "Codec", buffer: FlatBuffer) -> None:
        super().__init__(buffer)
        self.codec, self.sends_twice = codec, buffer.keeps_all
        self._shape = (buffer.ranks.size, buffer.segment_numel)
        self.keeps_momentum = codec.momentum > 0 or codec.sends_momentum
        self.sends_momentum, self.freezes_variance = codec.sends_momentum, codec.freezes_variance
        self.fills_variance, self.update_limit = codec.is_sparse, codec.update_limit
        num_slots = len(buffer.layout.slots)
        self.momentum_factors = [codec.momentum or 0.9] * num_slots  # Adam's are told
        self._kept_values = _ErrorFeedback(codec, buffer, self.momentum_factors)
        self.keeps = self._tells_usage = codec.keeps
        self._used = torch.ones(num_slots, dtype=torch.uint8, device=buffer.device)
        self._used_all = True
        self._unused: list[int] = []  # tensors of the buffer that no rank has values for
        self._travel: _Travel | None = None

    @property
    @override
    def kept(self) -> list[Tensor]:
        return self._kept_values.tensors

    @override
    @torch.no_grad()
    def passes(self, values: Tensor, used: Sequence[bool] | None = None) -> bool:
        if not self.codec.is_dense(self.step):
            return False
        if self.keeps_momentum:
            self._kept_values.allocate()
            gradient = self._taken(values)
            self._note_used(used)
            told = torch.cat([self._used, ~_is_finite(gradient)[None]])
            self.buffer.ranks.all_reduce(told, "max").wait()
            self._learn_unused(told[:-1])
            self._kept_values.take_up(gradient, None, self._unused, told[-1] == 0)
            if not self.codec.is_dense(self.step + 1):
                self.tally.sent_bytes += self._kept_values.share_momentum()
            self.tally.sent_bytes += ring_share(2 * told.numel(), self.buffer.ranks.size)
        self._pass()
        return True

    @override
    @torch.no_grad()
    def begin(self, values: Tensor, out: Tensor, used: Sequence[bool] | None = None) -> None:
        self._kept_values.allocate()
        self._note_used(used)
        self.froze_variance = self.freezes_variance
        gradient = self._taken(values)
        full = self._kept_values.with_kept(gradient)
        sound = _is_finite(full)
        sent, form = self._encode(if_sound(sound, full), sound)
        rows, ranks = torch.empty_like(sent), self.buffer.ranks
        self._travel = _Travel(
            out=out,
            scale=self.buffer.loss_scale(),
            gradient=gradient if self._tells_usage else None,
            sent=sent,
            sent_form=form,
            rows=rows,
            form=form,
            pending=ranks.all_to_all(rows.view(-1), sent.view(-1), async_op=True),
        )
        self._count((ranks.size - 1) * form.num_bytes)

    def _note_used(self, used: Sequence[bool] | None) -> None:
        self._used_all = used is None or all(used)
        if used is None or self._used_all:
            self._used.fill_(1)
        else:
            self._used = sent_up(torch.tensor(used, dtype=torch.uint8), self._used.device)

    def _taken(self, values: Tensor) -> Tensor:
        """Return the values as segments, without the loss scale."""
        numel, padded = self.buffer.numel, self._shape[0] * self._shape[1]
        taken = torch.empty(padded, dtype=torch.float32, device=self.buffer.device)
        taken[:numel].copy_(values)
        taken[numel:].zero_()
        if (scale := self.buffer.loss_scale()) is not None:
            taken.div_(scale)
        self._clip(taken)
        for start, stop in self.buffer.layout.gaps:  # what decoding has made must not come back
            taken[start:stop] = 0.0
        return taken.view(self._shape)

    def _learn_unused(self, used: Tensor) -> None:
        reads = not self._used_all  # else there is nothing to learn, nor a device to wait for
        self._unused = (used == 0).nonzero().view(-1).tolist() if reads else []

    def _encode(self, segments: Tensor, sound: Tensor, first: int = 0) -> tuple[Tensor, _Form]:
        """Return encoded rows, (segments, num_bytes); `first` varies this call's random seeds."""
        tells = (self._used,) if self._tells_usage else ()
        fields = [
            (*self.codec.encode(segment, self._turn(first + index)), *tells)
            for index, segment in enumerate(segments)
        ]
        form = form_of(fields[0])
        device = self.buffer.device
        rows = torch.zeros(len(fields), form.num_bytes, dtype=torch.uint8, device=device)
        for row, one in zip(rows, fields, strict=True):
            self._check(one, form)
            write_row(row, form, one, sound)
        return rows, form

    def _turn(self, segment: int) -> Turn:
        seed = 0
        parts = (self.buffer.number, self.step, self.buffer.ranks.rank, segment)
        for factor, part in zip(_SEED_FACTORS, parts, strict=True):
            seed = seed * factor + part
        num_summed = 1 if segment < self._shape[0] else self._shape[0]
        return Turn(self.step, seed % (1 << 62), num_summed)

    def _check(self, fields: Sequence[Tensor], form: _Form) -> None:
        if form_of(fields) != form:
            raise ConfigError(
                f"Rank {self.buffer.ranks.rank}: {type(self.codec).__name__}.encode has returned "
                f"{_described(form_of(fields))} for one segment and {_described(form)} "
                f"for another of the same size, expected types and shapes that depend on the "
                f"number of values alone. Pad what varies."
            )

    def _decode(self, row: Tensor, form: _Form) -> Tensor:
        fields = read_row(row, form)
        fields = fields[:-1] if self._tells_usage else fields
        decoded = self.codec.decode(fields, self._shape[1])
        if decoded.shape != self._shape[1:] or decoded.dtype != torch.float32:
            raise ConfigError(
                f"Rank {self.buffer.ranks.rank}: {type(self.codec).__name__}.decode has returned "
                f"{decoded.dtype} of shape {tuple(decoded.shape)}, expected torch.float32 of shape "
                f"{self._shape[1:]}."
            )
        return decoded

    def _without_unused(self, segment: Tensor, index: int) -> Tensor:
        """Zero in place the values of a segment's tensors that no rank uses."""
        for slot in self._unused:
            segment[self.buffer.within(index, slot)] = 0.0
        return segment

    @override
    @torch.no_grad()
    def proceed(self) -> None:
        travel, ranks = self._travel, self.buffer.ranks
        if travel is None or travel.owned is not None or not self.buffer.keeps_all:
            return
        mean, sound = self._mean(travel)
        travel.owned = self._kept_values.with_owned(mean)
        sound = sound & _is_finite(travel.owned)
        values = if_sound(sound, travel.owned)
        if self._unused:
            values = self._without_unused(values.clone(), ranks.rank)
        row, travel.form = self._encode(values[None], sound, first=ranks.size)
        travel.rows = row.new_empty(ranks.size, travel.form.num_bytes)
        travel.pending = ranks.all_gather(travel.rows.view(-1), row.view(-1), async_op=True)
        travel.owned_row = row
        self.tally.sent_bytes += (ranks.size - 1) * travel.form.num_bytes

    def _mean(self, travel: _Travel) -> tuple[Tensor, Tensor]:
        """Return the average of the own segment, zero unless it is sound, and whether it is."""
        travel.pending.wait()
        rows, form = travel.rows, travel.form
        if self._tells_usage:
            self._learn_unused(torch.stack([read_row(row, form)[-1] for row in rows]).amax(0))
        total = self._decode(rows[0], form).clone()
        for row in rows[1:]:
            total += self._decode(row, form)
        total.div_(len(rows))
        sound = all_sound(rows) & _is_finite(total)
        return self._without_unused(if_sound(sound, total), self.buffer.ranks.rank), sound

    @override
    @torch.no_grad()
    def wait(self) -> None:
        self.proceed()
        travel, self._travel = self._travel, None
        assert travel is not None
        if self.buffer.keeps_all:
            sound = self._take_all(travel)
        else:
            average, sound = self._mean(travel)
            self._take_up(travel, all_sound(travel.rows))
            travel.out.copy_(average)
        scale_up(travel.out, travel.scale)
        travel.out.masked_fill_(~sound, torch.nan)
        self.step += 1

    def _take_up(self, travel: _Travel, sound: Tensor) -> None:
        if travel.gradient is not None:
            sent = (self._decode(row, travel.sent_form) for row in travel.sent)
            self._kept_values.take_up(travel.gradient, sent, self._unused, sound)

    def _take_all(self, travel: _Travel) -> Tensor:
        """Decode every segment's average into `out`; return whether they are sound."""
        travel.pending.wait()
        assert travel.owned is not None
        sound = all_sound(travel.rows)
        self._take_up(travel, sound)
        for index, part in enumerate(torch.split(travel.out, self._shape[1])):
            average = self._decode(travel.rows[index], travel.form)
            average = self._without_unused(average, index)
            part.copy_(average[: part.numel()])
            if index == self.buffer.ranks.rank:
                self._kept_values.take_up_owned(travel.owned, average, self._unused, sound)
            if self._kept_values.shares_momentum:
                self._kept_values.go_on_from(average, index, self._unused, sound)
        return sound

    @override
    def own_state(self) -> State:
        return self._kept_values.own_state()

    @override
    @torch.no_grad()
    def load_own(self, own: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._kept_values.load_own(own)

    @override
    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        self.step = step
        self._kept_values.load(state)


def _is_finite(values: Tensor) -> Tensor:
    """Return whether all values and their greatest difference are finite: a bool scalar."""
    if not values.numel():
        return torch.tensor(True, device=values.device)
    least, greatest = values.aminmax()  # NaN if there is one
    return greatest - least < torch.inf


def _described(form: _Form) -> list[str]:
    return [f"{field.dtype} {tuple(field.shape)}" for field in form.fields]
