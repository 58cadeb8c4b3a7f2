"""The average of a buffer through a codec: every message is small, every sum is in float32.

            begin                          proceed                        wait
    rank 0  [a0|a1] ─encode─┐   a0+b0 ─mean, encode─┐   [ab0|ab1]
                        all-to-all              all-gather
    rank 1  [b0|b1] ─encode─┘   a1+b1 ─mean, encode─┘   [ab0|ab1]

Each rank sends 2(N-1)/N of the encoded buffer, as a ring does of a dense one. A rank that needs
its own segment only stops before the second encoding. All ranks decode the same bytes, so they
hold the same bits.

With error feedback a rank keeps what each of its encodings has lost: of its own values, and of the
averages of its segment. Source: Deep Gradient Compression (momentum, masking), arXiv:1712.01887;
two-sided error compensation, arXiv:1905.05957.
"""

from collections.abc import Mapping, Sequence
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
        self.update_limit = codec.update_limit
        self.momentum_factor = codec.momentum or 0.9  # Adam's is told by its optimizer
        needs_owner = codec.error_feedback and buffer.keeps_all
        self._residual = self._zeros(self._shape) if codec.error_feedback else None
        self._owner_residual = self._zeros(self._shape[1:]) if needs_owner else None
        self._momentum = self._zeros(self._shape) if self.keeps_momentum else None
        self._shares_momentum = codec.sends_momentum and not codec.is_sparse
        self._out: Tensor | None = None
        self._scale = 1.0
        self._outgoing: Tensor | None = None  # held while it travels
        self._rows: Tensor | None = None  # on its way, (W, num_bytes)
        self._form = wire.form_of([])
        self._pending: Pending | None = None
        self._has_proceeded = False

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.buffer.device)

    @override
    @torch.no_grad()
    def passes(self, values: Tensor) -> bool:
        if not self.codec.is_dense(self.step):
            return False
        if self._momentum is not None:
            values, sound = self._taken(values)
            self._add_up(values, sound)
        self.sent_momentum = False
        self._count(self.buffer.dense_numel * 4)
        self.step += 1
        return True

    @override
    @torch.no_grad()
    def begin(self, values: Tensor, out: Tensor) -> None:
        self._out, self._scale, self._has_proceeded = out, self.loss_scale(), False
        self.sent_momentum = self.codec.sends_momentum
        segments, sound = self._taken(values)
        if self._momentum is not None:
            segments = self._add_up(segments, sound)
        if self._residual is not None:
            segments = self._residual.add_(if_sound(sound, segments))
        rows = self._encode(segments, sound)
        if self._residual is not None:
            self._keep_rest(rows, sound)
        self._outgoing, self._rows = rows, torch.empty_like(rows)
        ranks = self.buffer.ranks
        self._pending = ranks.all_to_all(self._rows.view(-1), rows.view(-1), async_op=True)
        self._count((ranks.size - 1) * self._form.num_bytes)

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
        least, greatest = taken.aminmax()  # NaN if there is one
        sound = greatest - least < torch.inf
        return if_sound(sound, taken).view(self._shape), sound

    def _add_up(self, segments: Tensor, sound: Tensor) -> Tensor:
        assert self._momentum is not None
        factor = self.momentum_factor
        gain = 1.0 - factor if self.codec.sends_momentum else 1.0
        added = self._momentum * factor + segments * gain
        return self._momentum.copy_(if_sound(sound, added, self._momentum))

    def _encode(self, segments: Tensor, sound: Tensor, first: int = 0) -> Tensor:
        """Shape (segments, num_bytes); `first` tells the random numbers of this call apart."""
        fields = [
            self.codec.encode(segment, self._turn(first + index))
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
        decoded = self.codec.decode(wire.read(row, self._form), self._shape[1])
        if decoded.shape != self._shape[1:] or decoded.dtype != torch.float32:
            raise ConfigError(
                f"Rank {self.buffer.ranks.rank}: {type(self.codec).__name__}.decode has returned "
                f"{decoded.dtype} of shape {tuple(decoded.shape)}, expected torch.float32 of shape "
                f"{self._shape[1:]}."
            )
        return decoded

    def _keep_rest(self, rows: Tensor, sound: Tensor) -> None:
        assert self._residual is not None
        for index, row in enumerate(rows):
            sent = if_sound(sound, self._decode(row))
            self._residual[index].sub_(sent)
            if self._momentum is not None and not self._shares_momentum:
                self._momentum[index].masked_fill_(sent != 0, 0.0)  # arXiv:1712.01887, section 3.2

    @override
    @torch.no_grad()
    def proceed(self) -> None:
        if self._has_proceeded or not self.buffer.keeps_all:
            return
        self._has_proceeded = True
        mean, sound = self._mean()
        if self._owner_residual is not None:
            mean = self._owner_residual.add_(mean)
        own = self._encode(mean[None], sound, first=self._shape[0])
        if self._owner_residual is not None:
            self._owner_residual.sub_(if_sound(sound, self._decode(own[0])))
        self._outgoing = own
        self._rows = own.new_empty(self._shape[0], self._form.num_bytes)
        self.tally.sent_bytes += (self._shape[0] - 1) * self._form.num_bytes
        self._pending = self.buffer.ranks.all_gather(
            self._rows.view(-1), own.view(-1), async_op=True
        )

    def _mean(self) -> tuple[Tensor, Tensor]:
        """The average of the own segment, zero unless sound, and whether it is."""
        rows = self._arrived()
        sound = wire.all_sound(rows)
        total = self._decode(rows[0]).clone()
        for row in rows[1:]:
            total += self._decode(row)
        return if_sound(sound, total.div_(len(rows))), sound

    def _arrived(self) -> Tensor:
        assert self._pending is not None
        assert self._rows is not None
        self._pending.wait()
        rows, self._rows, self._outgoing, self._pending = self._rows, None, None, None
        return rows

    @override
    @torch.no_grad()
    def wait(self) -> None:
        self.proceed()
        assert self._out is not None
        if self.buffer.keeps_all:
            rows = self._arrived()
            sound = wire.all_sound(rows)
            for index, part in enumerate(torch.split(self._out, self._shape[1])):
                average = self._decode(rows[index])
                part.copy_(average[: part.numel()])
                if self._momentum is not None and self._shares_momentum:
                    own = self._momentum[index]
                    own.copy_(if_sound(sound, average, own))  # all go on from the same one
        else:
            average, sound = self._mean()
            self._out.copy_(average)
        if self._scale != 1.0:
            self._out.mul_(self._scale)
        self._out.masked_fill_(~sound, torch.nan)
        self._out = None
        self.step += 1

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
        if self._owner_residual is not None:
            self._owner_residual.zero_()
        for kind, full in (("residual", self._residual), ("momentum", self._momentum)):
            if full is None:
                continue
            full.zero_()
            for name, view in self.buffer.views(full.view(-1)).items():
                if name in state.get(kind, {}):
                    view.copy_(state[kind][name])


def _described(form: wire.Form) -> list[str]:
    return [f"{field.dtype} {tuple(field.shape)}" for field in form.fields]
