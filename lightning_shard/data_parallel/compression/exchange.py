"""The average of a buffer through a codec: every message is small, every sum is in float32.

            begin                          proceed                        wait
    rank 0  [a0|a1] ─encode─┐   a0+b0 ─mean, encode─┐   [ab0|ab1]
                        all-to-all              all-gather
    rank 1  [b0|b1] ─encode─┘   a1+b1 ─mean, encode─┘   [ab0|ab1]

Each rank sends 2(N-1)/N of the encoded buffer, as a ring does of a dense one. A rank that needs
its own segment only stops before the second encoding. All ranks decode the same bytes, so they
hold the same bits.

With error feedback a rank keeps what each of its encodings has lost: of its own values, and of the
averages of its segment. It subtracts what it has sent only once it knows that all ranks' values are
finite and which tensors anybody has values for, which travels along: what nobody takes is not lost.
Source: Deep Gradient Compression (momentum, masking), arXiv:1712.01887;
two-sided error compensation, arXiv:1905.05957.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.backends.pending import Pending
from lightning_shard.data_parallel.compression import wire
from lightning_shard.data_parallel.compression.buffer import FlatBuffer
from lightning_shard.data_parallel.compression.compressor import Exchange, State, Turn, if_sound
from lightning_shard.errors import ConfigError

if TYPE_CHECKING:  # a codec makes its exchange
    from lightning_shard.data_parallel.compression.codec import Codec

_SEED_FACTORS = (1_000_003, 8_191, 2_053, 257)  # primes, for mixing counters into a seed


class CodecExchange(Exchange):
    """Averages one buffer through a codec.

    Args:
        codec: Encodes and decodes segments.
        buffer: The buffer.
    """

    def __init__(self, codec: "Codec", buffer: FlatBuffer) -> None:
        super().__init__(buffer)
        self.codec = codec
        self._shape = (buffer.ranks.size, buffer.segment_numel)
        self.keeps_momentum = codec.momentum > 0 or codec.sends_momentum
        self.sends_momentum = codec.sends_momentum
        self.is_sparse, self.update_limit = codec.is_sparse, codec.update_limit
        slots = buffer.layout.slots
        self.momentum_factors = [codec.momentum or 0.9] * len(slots)  # Adam's are told
        self._residual: Tensor | None = None  # these three from the first average
        self._owner_residual: Tensor | None = None
        self._momentum: Tensor | None = None
        self._shares_momentum = codec.sends_momentum and not codec.is_sparse
        self._tells_usage = codec.error_feedback or self.keeps_momentum
        self._used = torch.ones(len(slots), dtype=torch.uint8, device=buffer.device)
        self._added: Tensor | None = None  # the gradient on its way, (W, segment)
        self._sound_here = torch.tensor(True)
        self._used_all = True
        self._unused: list[int] = []  # tensors of the buffer that no rank has values for
        self._out: Tensor | None = None
        self._scale = 1.0
        self._outgoing: Tensor | None = None  # held while it travels
        self._rows: Tensor | None = None  # on its way, (W, num_bytes)
        self._form = wire.form_of([])
        self._pending: Pending | None = None
        self._has_proceeded = False

    def _allocate(self) -> None:
        """Make what is kept; of frozen parameters that is nothing."""
        if self.codec.error_feedback and self._residual is None:
            self._residual = self._zeros(self._shape)
            if self.buffer.keeps_all:
                self._owner_residual = self._zeros(self._shape[1:])
        if self.keeps_momentum and self._momentum is None:
            self._momentum = self._zeros(self._shape)

    @property
    @override
    def kept(self) -> list[Tensor]:
        kept = (self._residual, self._owner_residual, self._momentum)
        return [tensor for tensor in kept if tensor is not None]

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.buffer.device)

    @override
    @torch.no_grad()
    def passes(self, values: Tensor, used: Sequence[bool] | None = None) -> bool:
        if not self.codec.is_dense(self.step):
            return False
        self._allocate()
        if self._momentum is not None:
            values, sound = self._taken(values)
            self._add_up(values, sound)
            self._note_used(used)
            self.buffer.ranks.all_reduce(self._used, "max").wait()
            self._leave_unused(self._used, sound)
        self.sent_momentum = False
        self._count(self.buffer.dense_numel * 4)
        self.step += 1
        return True

    @override
    @torch.no_grad()
    def begin(self, values: Tensor, out: Tensor, used: Sequence[bool] | None = None) -> None:
        self._allocate()
        self._note_used(used)
        self._out, self._scale, self._has_proceeded = out, self.loss_scale(), False
        self.sent_momentum = self.codec.sends_momentum
        segments, sound = self._taken(values)
        self._added, self._sound_here = segments, sound
        if self._momentum is not None:
            segments = self._add_up(segments, sound)
        if self._residual is not None:
            segments = self._residual.add_(if_sound(sound, segments))
        if not self._tells_usage:
            self._added = None  # nothing is kept of it
        rows = self._encode(segments, sound)
        self._outgoing, self._rows = rows, torch.empty_like(rows)
        ranks = self.buffer.ranks
        self._pending = ranks.all_to_all(self._rows.view(-1), rows.view(-1), async_op=True)
        self._count((ranks.size - 1) * self._form.num_bytes)

    def _note_used(self, used: Sequence[bool] | None) -> None:
        self._used_all = used is None or all(used)
        if used is None:
            self._used.fill_(1)
        else:
            self._used.copy_(torch.tensor(used, dtype=torch.uint8))

    def _taken(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The segments without the loss scale, finite, and whether they were so before."""
        numel, padded = self.buffer.numel, self._shape[0] * self._shape[1]
        taken = torch.empty(padded, dtype=torch.float32, device=self.buffer.device)
        taken[:numel].copy_(values)
        taken[numel:].zero_()
        if (scale := self.loss_scale()) != 1.0:
            taken.div_(scale)
        for gap in self.buffer.gaps:  # what decoding has made of them must not come back
            taken[gap] = 0.0
        sound = _is_finite(taken)
        return if_sound(sound, taken).view(self._shape), sound

    def _add_up(self, segments: Tensor, sound: Tensor) -> Tensor:
        assert self._momentum is not None
        added = self._momentum.clone()
        for places, factor in self._places_by_factor():
            gain = 1.0 - factor if self.codec.sends_momentum else 1.0
            added.view(-1)[places].mul_(factor).add_(segments.view(-1)[places], alpha=gain)
        return self._momentum.copy_(if_sound(sound, added, self._momentum))

    def _places_by_factor(self) -> Iterator[tuple[slice, float]]:
        """Where each factor of momentum holds: everywhere, if it is one."""
        if len(set(self.momentum_factors)) == 1:
            yield slice(None), self.momentum_factors[0]
            return
        for slot, factor in zip(self.buffer.layout.slots, self.momentum_factors, strict=True):
            yield slice(slot.offset, slot.stop), factor

    def _leave_unused(self, used: Tensor, sound: Tensor) -> None:
        """Learn what no rank has values for, and undo what its momentum has gone through."""
        reads = not self._used_all  # else there is nothing to learn, nor a device to wait for
        self._unused = (used == 0).nonzero().view(-1).tolist() if reads else []
        if self._momentum is None or not self._unused or not sound:
            return
        for index in self._unused:
            slot, factor = self.buffer.layout.slots[index], self.momentum_factors[index]
            momentum = self._momentum.view(-1)[slot.offset : slot.stop]
            if self._residual is not None and not self.codec.is_dense(self.step):
                self._residual.view(-1)[slot.offset : slot.stop].sub_(momentum)
            if factor:
                momentum.div_(factor)

    def _encode(self, segments: Tensor, sound: Tensor, first: int = 0) -> Tensor:
        """Shape (segments, num_bytes); `first` tells the random numbers of this call apart."""
        tells = (self._used,) if self._tells_usage else ()
        fields = [
            (*self.codec.encode(segment, self._turn(first + index)), *tells)
            for index, segment in enumerate(segments)
        ]
        self._form = wire.form_of(fields[0])
        device = self.buffer.device
        rows = torch.zeros(len(fields), self._form.num_bytes, dtype=torch.uint8, device=device)
        for row, one in zip(rows, fields, strict=True):
            self._check(one)
            wire.write(row, self._form, one, sound)
        return rows

    def _turn(self, segment: int) -> Turn:
        seed = 0
        parts = (self.buffer.number, self.step, self.buffer.ranks.rank, segment)
        for factor, part in zip(_SEED_FACTORS, parts, strict=True):
            seed = seed * factor + part
        num_summed = 1 if segment < self._shape[0] else self._shape[0]
        return Turn(self.step, seed % (1 << 62), num_summed)

    def _check(self, fields: Sequence[Tensor]) -> None:
        if wire.form_of(fields) != self._form:
            raise ConfigError(
                f"Rank {self.buffer.ranks.rank}: {type(self.codec).__name__}.encode has returned "
                f"{_described(wire.form_of(fields))} for one segment and {_described(self._form)} "
                f"for another of the same size, expected types and shapes that depend on the "
                f"number of values alone. Pad what varies."
            )

    def _decode(self, row: Tensor) -> Tensor:
        fields = wire.read(row, self._form)
        fields = fields[:-1] if self._tells_usage else fields
        decoded = self.codec.decode(fields, self._shape[1])
        if decoded.shape != self._shape[1:] or decoded.dtype != torch.float32:
            raise ConfigError(
                f"Rank {self.buffer.ranks.rank}: {type(self.codec).__name__}.decode has returned "
                f"{decoded.dtype} of shape {tuple(decoded.shape)}, expected torch.float32 of shape "
                f"{self._shape[1:]}."
            )
        return decoded

    def _keep_rest(self, sent_rows: Tensor, sound: Tensor) -> None:
        """Subtract what has been sent from what is to be sent, unless it comes to nothing."""
        assert self._residual is not None
        for index, row in enumerate(sent_rows):
            sent = if_sound(sound, self._without_unused(self._decode(row), index))
            self._residual[index].sub_(sent)
            if self._momentum is not None and not self._shares_momentum:
                self._momentum[index].masked_fill_(sent != 0, 0.0)  # arXiv:1712.01887, section 3.2

    def _without_unused(self, segment: Tensor, index: int) -> Tensor:
        """Zero in place, in the values of a segment, those of tensors that nobody uses."""
        for slot in self._unused:
            segment[self.buffer.within(index, slot)] = 0.0
        return segment

    @override
    @torch.no_grad()
    def proceed(self) -> None:
        if self._has_proceeded or not self.buffer.keeps_all:
            return
        self._has_proceeded = True
        mean, sound = self._mean()
        if self._owner_residual is not None:
            mean = self._owner_residual.add_(mean)
            if self._unused:
                mean = self._without_unused(mean.clone(), self.buffer.ranks.rank)
        own = self._encode(mean[None], sound, first=self._shape[0])
        self._outgoing = own
        self._rows = own.new_empty(self._shape[0], self._form.num_bytes)
        self.tally.sent_bytes += (self._shape[0] - 1) * self._form.num_bytes
        self._pending = self.buffer.ranks.all_gather(
            self._rows.view(-1), own.view(-1), async_op=True
        )

    def _mean(self) -> tuple[Tensor, Tensor]:
        """The average of the own segment, zero unless sound, and whether it is.

        Values that are finite may have a sum that is not.
        """
        sent_rows, rows = self._arrived()
        sound = wire.all_sound(rows)
        self._discard(sound)
        if self._tells_usage:
            used = torch.stack([wire.read(row, self._form)[-1] for row in rows]).amax(0)
            self._leave_unused(used, sound)
        if self._residual is not None:
            self._keep_rest(sent_rows, sound)
        total = self._decode(rows[0]).clone()
        for row in rows[1:]:
            total += self._decode(row)
        total.div_(len(rows))
        sound = sound & _is_finite(total)
        return self._without_unused(if_sound(sound, total), self.buffer.ranks.rank), sound

    def _discard(self, sound: Tensor) -> None:
        """Unless all ranks' values are sound, take this rank's back: no rank will use the step."""
        added, self._added = self._added, None
        discards = self._sound_here & ~sound
        if added is None or (sound.device.type == "cpu" and not discards):
            return
        if self._residual is not None:
            sent = added if self._momentum is None else self._momentum
            self._residual.sub_(torch.where(discards, sent, 0.0))
        if self._momentum is None:
            return
        before = self._momentum.clone()
        for places, factor in self._places_by_factor():
            gain = 1.0 - factor if self.codec.sends_momentum else 1.0
            part = before.view(-1)[places].sub_(added.view(-1)[places], alpha=gain)
            part.div_(factor or 1.0)
        self._momentum.copy_(torch.where(discards, before, self._momentum))

    def _arrived(self) -> tuple[Tensor, Tensor]:
        """What this rank has sent, and what has come; nothing is on its way any more."""
        assert self._pending is not None
        assert self._rows is not None
        assert self._outgoing is not None
        self._pending.wait()
        sent, rows = self._outgoing, self._rows
        self._rows = self._outgoing = self._pending = None
        return sent, rows

    @override
    @torch.no_grad()
    def wait(self) -> None:
        self.proceed()
        assert self._out is not None
        if self.buffer.keeps_all:
            sound = self._take_all(self._out)
        else:
            average, sound = self._mean()
            self._out.copy_(average)
        if self._scale != 1.0:
            self._out.mul_(self._scale)
        self._out.masked_fill_(~sound, torch.nan)
        self._out = None
        self.step += 1

    def _take_all(self, out: Tensor) -> Tensor:
        """Decode every segment's average into `out`; return whether they are sound."""
        _, rows = self._arrived()
        sound = wire.all_sound(rows)
        for index, part in enumerate(torch.split(out, self._shape[1])):
            average = self._without_unused(self._decode(rows[index]), index)
            part.copy_(average[: part.numel()])
            if self._owner_residual is not None and index == self.buffer.ranks.rank:
                self._owner_residual.sub_(if_sound(sound, average))
            if self._momentum is not None and self._shares_momentum:
                self._go_on_from(if_sound(sound, average, self._momentum[index]), index)
        return sound

    def _go_on_from(self, average: Tensor, index: int) -> None:
        """Have all ranks go on from the same momentum; that of unused tensors stays."""
        assert self._momentum is not None
        own = self._momentum[index]
        places = [self.buffer.within(index, slot) for slot in self._unused]
        kept = [own[place].clone() for place in places]
        own.copy_(average)
        for place, values in zip(places, kept, strict=True):
            own[place] = values

    @override
    @torch.no_grad()
    def state(self) -> State:
        kept: dict[str, Tensor] = {}
        if self._residual is not None:
            kept["residual"] = self._residual.clone()
        if self._momentum is not None:
            kept["momentum"] = self._momentum.clone()
        for full in kept.values():
            self.buffer.ranks.all_reduce(full, "avg").wait()
        if self._owner_residual is not None:
            owned = torch.empty_like(kept["residual"])
            self.buffer.ranks.all_gather(owned.view(-1), self._owner_residual).wait()
            kept["residual"] += owned
        return {kind: self.buffer.views(full.view(-1)) for kind, full in kept.items()}

    @override
    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        self.step = step
        if any(name in state.get(kind, {}) for kind in state for name in self.buffer.names):
            self._allocate()
        if self._owner_residual is not None:
            self._owner_residual.zero_()
        for kind, full in (("residual", self._residual), ("momentum", self._momentum)):
            if full is None:
                continue
            full.zero_()
            for name, view in self.buffer.views(full.view(-1)).items():
                if name in state.get(kind, {}):
                    view.copy_(state[kind][name])


def _is_finite(values: Tensor) -> Tensor:
    """Whether all values, and the greatest of their differences, are: a scalar of bool."""
    if not values.numel():
        return torch.tensor(True, device=values.device)
    least, greatest = values.aminmax()  # NaN if there is one
    return greatest - least < torch.inf


def _described(form: wire.Form) -> list[str]:
    return [f"{field.dtype} {tuple(field.shape)}" for field in form.fields]
