"""The average of a buffer through a codec: every message is small, every sum is in float32.

            begin                          proceed                        wait
    rank 0  [a0|a1] ─encode─┐   a0+b0 ─mean, encode─┐   [ab0|ab1]
                        all-to-all              all-gather
    rank 1  [b0|b1] ─encode─┘   a1+b1 ─mean, encode─┘   [ab0|ab1]

Each rank sends 2(N-1)/N of the encoded buffer, as a ring does of a dense one. A rank that needs
its own segment only stops before the second encoding. All ranks decode the same bytes, so they
hold the same bits. Whether all values were finite travels along, and so does, where something is
kept from step to step (`error_feedback.py`), which tensors anybody has values for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.backends.pending import Pending
from lightning_shard.backends.streams import sent_up
from lightning_shard.backends.traffic import ring_share
from lightning_shard.data_parallel.compression import wire
from lightning_shard.data_parallel.compression.compressor import (
    Exchange,
    FlatBuffer,
    State,
    Turn,
    if_sound,
    scale_up,
)
from lightning_shard.data_parallel.compression.error_feedback import (
    ErrorFeedback,
    ErrorFeedbackRules,
)
from lightning_shard.errors import ConfigError

_SEED_FACTORS = (1_000_003, 8_191, 2_053, 257)  # primes, for mixing counters into a seed


class SegmentCodec(ErrorFeedbackRules, Protocol):
    """The methods of a `Codec` that its exchange calls."""

    update_limit: float

    @property
    def freezes_variance(self) -> bool:
        """Whether Adam's second moment is frozen after the warm-up."""

    def encode(self, values: Tensor, turn: Turn) -> Sequence[Tensor]:
        """Encode the values of a segment in fewer bytes."""

    def decode(self, fields: Sequence[Tensor], numel: int) -> Tensor:
        """Decode a segment's values from the tensors that `encode` returned."""

    def is_dense(self, step: int) -> bool:
        """Whether nothing is compressed in this step."""


@dataclass(eq=False, kw_only=True)
class _Travel:
    """One average on its way.

    Attributes:
        out: Tensor for the average.
        scale: The loss scale that was in the values, if there was one.
        gradient: This rank's values, shape (W, segment); None where nothing of them is kept.
        sent: The encoded values, shape (W, num_bytes), one row for each rank.
        sent_form: Form of the rows of `sent`.
        rows: The received rows, shape (W, num_bytes): this segment's values, then all averages.
        form: Form of the rows of `rows`.
        pending: Handle of the communication that fills `rows`.
        owned: In the second half, the values that this rank sends as its segment's average.
        owned_row: The encoded `owned`, held while it travels.
    """

    out: Tensor
    scale: Tensor | None
    gradient: Tensor | None
    sent: Tensor
    sent_form: wire.Form
    rows: Tensor
    form: wire.Form
    pending: Pending
    owned: Tensor | None = None
    owned_row: Tensor | None = None


class CodecExchange(Exchange):
    """Averages one buffer through a codec.

    Args:
        codec: Codec that encodes and decodes segments.
        buffer: The buffer that is averaged.
    """

    def __init__(self, codec: SegmentCodec, buffer: FlatBuffer) -> None:
        super().__init__(buffer)
        self.codec = codec
        self._shape = (buffer.ranks.size, buffer.segment_numel)
        self.keeps_momentum = codec.momentum > 0 or codec.sends_momentum
        self.sends_momentum, self.freezes_variance = codec.sends_momentum, codec.freezes_variance
        self.fills_variance, self.update_limit = codec.is_sparse, codec.update_limit
        num_slots = len(buffer.layout.slots)
        self.momentum_factors = [codec.momentum or 0.9] * num_slots  # Adam's are told
        self._kept_values = ErrorFeedback(codec, buffer, self.momentum_factors)
        self.keeps = self._tells_usage = codec.error_feedback or self.keeps_momentum
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
        self.froze_variance = False
        self._count(self.buffer.dense_bytes)
        self.step += 1
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
            scale=self.loss_scale(),
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
        if (scale := self.loss_scale()) is not None:
            taken.div_(scale)
        self._clip(taken)
        for gap in self.buffer.gaps:  # what decoding has made of them must not come back
            taken[gap] = 0.0
        return taken.view(self._shape)

    def _learn_unused(self, used: Tensor) -> None:
        reads = not self._used_all  # else there is nothing to learn, nor a device to wait for
        self._unused = (used == 0).nonzero().view(-1).tolist() if reads else []

    def _encode(self, segments: Tensor, sound: Tensor, first: int = 0) -> tuple[Tensor, wire.Form]:
        """Return encoded rows, (segments, num_bytes); `first` varies this call's random seeds."""
        tells = (self._used,) if self._tells_usage else ()
        fields = [
            (*self.codec.encode(segment, self._turn(first + index)), *tells)
            for index, segment in enumerate(segments)
        ]
        form = wire.form_of(fields[0])
        device = self.buffer.device
        rows = torch.zeros(len(fields), form.num_bytes, dtype=torch.uint8, device=device)
        for row, one in zip(rows, fields, strict=True):
            self._check(one, form)
            wire.write(row, form, one, sound)
        return rows, form

    def _turn(self, segment: int) -> Turn:
        seed = 0
        parts = (self.buffer.number, self.step, self.buffer.ranks.rank, segment)
        for factor, part in zip(_SEED_FACTORS, parts, strict=True):
            seed = seed * factor + part
        num_summed = 1 if segment < self._shape[0] else self._shape[0]
        return Turn(self.step, seed % (1 << 62), num_summed)

    def _check(self, fields: Sequence[Tensor], form: wire.Form) -> None:
        if wire.form_of(fields) != form:
            raise ConfigError(
                f"Rank {self.buffer.ranks.rank}: {type(self.codec).__name__}.encode has returned "
                f"{_described(wire.form_of(fields))} for one segment and {_described(form)} "
                f"for another of the same size, expected types and shapes that depend on the "
                f"number of values alone. Pad what varies."
            )

    def _decode(self, row: Tensor, form: wire.Form) -> Tensor:
        fields = wire.read(row, form)
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
        """Return the average of the own segment, zero unless sound, and whether it is sound.

        Values that are finite may have a sum that is not.
        """
        travel.pending.wait()
        rows, form = travel.rows, travel.form
        if self._tells_usage:
            self._learn_unused(torch.stack([wire.read(row, form)[-1] for row in rows]).amax(0))
        total = self._decode(rows[0], form).clone()
        for row in rows[1:]:
            total += self._decode(row, form)
        total.div_(len(rows))
        sound = wire.all_sound(rows) & _is_finite(total)
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
            self._take_up(travel, wire.all_sound(travel.rows))
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
        sound = wire.all_sound(travel.rows)
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


def _described(form: wire.Form) -> list[str]:
    return [f"{field.dtype} {tuple(field.shape)}" for field in form.fields]
