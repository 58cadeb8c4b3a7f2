"""Matrices travel as products of two thin ones, found by one power iteration a step.

    begin     P = M Q         average P      M = gradient + what was lost, (m, n); Q from last time
    proceed   orthogonalise P
              Q = M' P        average Q      what is lost: M - P Q' of this rank
    wait      average M = P Q'       the next Q: this one, each column scaled to 1 at most

Both averages are sums of linear functions of M, so they need no gathering and no second loss.
Vectors, and matrices too small to gain, travel with P. P is made orthonormal after it has
travelled, so that its rounding costs nothing; what rounding takes from this rank's Q and vectors,
it sends later. P also tells which tensors have values on any rank.
Source: PowerSGD, arXiv:1905.13727.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.backends.pending import Pending
from lightning_shard.backends.streams import sent_up
from lightning_shard.backends.traffic import ring_share
from lightning_shard.core.layout import Slot, build_layout
from lightning_shard.core.options import AtLeastOne, AtLeastZero, checked_options
from lightning_shard.data_parallel.compression.built_in import BF16
from lightning_shard.data_parallel.compression.compressor import (
    Compressor,
    Exchange,
    FlatBuffer,
    State,
    if_sound,
    scale_up,
    unscaled,
)
from lightning_shard.errors import ConfigError

WireDType = Literal["float32", "bfloat16"]


class VectorAverage:
    """Averages a vector over the ranks, once in each step.

        float32     all-reduce
        bfloat16    all-to-all, sum in float32, all-gather      half the bytes, one more message

    Gloo's and MPI's all-reduce would sum in bfloat16; so what is rounded goes through a codec.

    Attributes:
        values: Shape (numel,), float32: this rank's, and after `wait` the average, the same bits on
            all ranks. Not finite there, unless all ranks' values are.
    """

    def __init__(self, numel: int, buffer: FlatBuffer, dtype: WireDType) -> None:
        self.values = torch.zeros(numel, dtype=torch.float32, device=buffer.device)
        self._ranks, self._dtype = buffer.ranks, dtype
        self._exchange: Exchange | None = None
        if dtype == "bfloat16" and numel:
            layout = build_layout([("values", (numel,))], num_shards=1)
            parts = replace(buffer, layout=layout, keeps_all=True, loss_scale=unscaled)
            self._exchange = BF16().exchange(parts)
        self._pending: Pending | Exchange | None = None

    def round_(self, part: Tensor) -> None:
        """Round `part` of this rank's values in place, as the other ranks will get them."""
        if self._dtype == "bfloat16":
            part.copy_(part.bfloat16())

    def begin(self) -> int:
        """Start averaging; each rank must call. Return the bytes that this rank sends in all."""
        if self._exchange is None:
            self._pending = self._ranks.all_reduce(self.values, "avg", async_op=True)
            return 4 * ring_share(2 * self.values.numel(), self._ranks.size)
        sent_before = self._exchange.tally.sent_bytes
        self._exchange.begin(self.values, self.values)
        self._pending = self._exchange
        return 2 * (self._exchange.tally.sent_bytes - sent_before)  # the way back is as long

    def wait(self) -> None:
        """Return once `values` holds the average; each rank must call, in the order of `begin`."""
        assert self._pending is not None
        self._pending.wait()
        self._pending = None


@dataclass(eq=False)
class Factors:
    """One matrix of a buffer and its two thin factors.

        M (m, n)  ≈  P (m, rank), orthonormal columns  ·  Q' (rank, n)

    Attributes:
        slot: Slot of the matrix: its first dimension are the rows, all others the columns.
        q: Shape (columns, rank): the next power iteration starts from it; no value is over 1.
        p: Shape (rows, rank): a view of the vector averaged first.
        next_q: Shape (columns, rank): a view of the vector averaged second.
    """

    slot: Slot
    q: Tensor
    p: Tensor
    next_q: Tensor

    def matrix(self, full: Tensor) -> Tensor:
        """Return the matrix as a view of a flat tensor."""
        return full[self.slot.offset : self.slot.stop].view(self.slot.shape[0], -1)

    def orthonormalise(self, sound: Tensor) -> None:
        """Make the columns of P of length 1 and at right angles; any such ones unless `sound`."""
        p = if_sound(sound, self.p)
        self.p.copy_(torch.linalg.qr(scaled(p, otherwise=p)).Q)

    def start_from(self, q: Tensor) -> None:
        """Begin the next iteration with the directions of the columns of `q`, (columns, rank).

        Lengths would grow with each gradient until all later P overflow, so they do not stay.
        """
        self.q.copy_(scaled(q, otherwise=self.q))


def scaled(columns: Tensor, otherwise: Tensor) -> Tensor:
    """Return columns divided by their greatest value; those of `otherwise` where it is bad."""
    greatest = columns.abs().amax(0)
    return torch.where((greatest > 0) & (greatest < torch.inf), columns / greatest, otherwise)


def num_columns(slot: Slot) -> int:
    """Return the number of columns: all dimensions but the first, as one."""
    return prod(slot.shape[1:])


def rank_of(slot: Slot, rank: int) -> int:
    """Return the rank of a matrix's factors, at most `rank`."""
    return min(rank, slot.shape[0], num_columns(slot))


def pays(slot: Slot, rank: int) -> bool:
    """Whether the factors of a matrix have fewer elements than the matrix."""
    if len(slot.shape) < 2 or not slot.numel:
        return False
    return rank_of(slot, rank) * (slot.shape[0] + num_columns(slot)) < slot.numel


class PowerSGD(Compressor):
    """Approximations of low rank, with error feedback and warm start.

    Args:
        rank: Rank of the approximation; 1 to 4 are usual.
        warmup_steps: Number of dense averages at the start: one in a step, but for the
            micro-batches of zero2.
        seed: Seed of the first guess, the same on all ranks.
        factor_dtype: Format on the wire of the factors, and of tensors without factors. For the
            bytes of one rank in "float32", "bfloat16" sends twice the rank.
        adam: Whether the optimizer is torch's Adam or AdamW, whose second moment is frozen after
            the warm-up, as in 1-bit Adam (arXiv:2102.02888): error feedback sends in one step what
            many have lost, and Adam would divide such a spike by itself. Gradients travel all the
            same.
    """

    @checked_options
    def __init__(
        self,
        rank: AtLeastOne = 2,
        warmup_steps: AtLeastZero = 0,
        seed: int = 0,
        factor_dtype: WireDType = "float32",
        adam: bool = False,
    ) -> None:
        if adam and not warmup_steps:
            raise ConfigError(
                "PowerSGD(adam=True) needs a warm-up, in which Adam learns its second moment, got "
                "warmup_steps=0. A tenth of all steps is usual; or pass adam=False."
            )
        self.rank = rank
        self.warmup_steps = warmup_steps
        self.seed = seed
        self.factor_dtype: WireDType = factor_dtype
        self.adam = adam

    @property
    @override
    def freezes_variance(self) -> bool:
        return self.adam

    @override
    def exchange(self, buffer: FlatBuffer) -> Exchange:
        return LowRankExchange(self, buffer)


@dataclass(eq=False)
class _Travel:
    """One average on its way: M of this rank, then what is lost; whether P was finite."""

    out: Tensor
    scale: Tensor | None
    work: Tensor
    sound: Tensor | None = None


class LowRankExchange(Exchange):
    """Averages one buffer by PowerSGD."""

    keeps = True

    def __init__(self, settings: PowerSGD, buffer: FlatBuffer) -> None:
        super().__init__(buffer)
        self._settings = settings
        self.freezes_variance = settings.freezes_variance
        self.variance_steps = max(1, settings.warmup_steps)  # of what is first used later, too
        self.fills_variance = True  # what has no gradient has no values
        slots = buffer.layout.slots
        self._thin = [slot for slot in slots if pays(slot, settings.rank)]
        self._plain = [slot for slot in slots if not pays(slot, settings.rank)]
        self._residual = self._plain_values = self._used = torch.empty(0)
        self._both: tuple[VectorAverage, VectorAverage] | None = None  # from the first average on
        self._factors: list[Factors] = []
        self._travel: _Travel | None = None

    def _messages(self) -> tuple[VectorAverage, VectorAverage]:
        """Return the vectors that are averaged; with them the kept values get memory."""
        if self._both is not None:
            return self._both
        device, dtype = self.buffer.device, self._settings.factor_dtype
        self._residual = torch.zeros(self.buffer.numel, dtype=torch.float32, device=device)
        ranks = [rank_of(slot, self._settings.rank) for slot in self._thin]
        num_p = sum(slot.shape[0] * rank for slot, rank in zip(self._thin, ranks, strict=True))
        num_q = sum(num_columns(slot) * rank for slot, rank in zip(self._thin, ranks, strict=True))
        num_plain = sum(slot.numel for slot in self._plain)
        sizes = [num_p, num_plain, len(self.buffer.layout.slots)]
        # P of all, the plain ones, and 1 for each tensor that this rank has values for.
        first = VectorAverage(sum(sizes), self.buffer, dtype)
        second = VectorAverage(num_q, self.buffer, dtype)  # Q of all
        p_values, self._plain_values, self._used = torch.split(first.values, sizes)
        self._factors = self._cut(ranks, p_values, second.values)
        self._both = first, second
        return self._both

    def _cut(self, ranks: list[int], p_values: Tensor, q_values: Tensor) -> list[Factors]:
        random = torch.Generator().manual_seed(self._settings.seed + self.buffer.number)
        factors, p_end, q_end = [], 0, 0
        for slot, rank in zip(self._thin, ranks, strict=True):
            p_shape, q_shape = (slot.shape[0], rank), (num_columns(slot), rank)
            p = p_values[p_end : p_end + prod(p_shape)].view(p_shape)
            next_q = q_values[q_end : q_end + prod(q_shape)].view(q_shape)
            q = torch.randn(q_shape, generator=random).to(self.buffer.device)
            factors.append(Factors(slot, scaled(q, otherwise=q), p, next_q))
            p_end, q_end = p_end + p.numel(), q_end + q.numel()
        return factors

    @override
    def passes(self, values: Tensor, used: Sequence[bool] | None = None) -> bool:
        if self.step >= self._settings.warmup_steps:
            return False
        self._pass()
        return True

    @override
    @torch.no_grad()
    def begin(self, values: Tensor, out: Tensor, used: Sequence[bool] | None = None) -> None:
        first, _ = self._messages()
        scale, work = self.buffer.loss_scale(), values.to(torch.float32, copy=True)
        self._travel = _Travel(out, scale, work)
        if scale is not None:
            work.div_(scale)
        self._clip(work)
        self.froze_variance = self.freezes_variance
        self._mark_used(work, used)
        for one in self._factors:
            matrix = one.matrix(work).add_(one.matrix(self._residual))
            torch.mm(matrix, one.q, out=one.p)
        for slot, part in self._plain_parts():
            full = work[slot.offset : slot.stop].add_(self._residual[slot.offset : slot.stop])
            part.copy_(full)
            first.round_(part)
            full.sub_(part)  # what is lost
        self._count(first.begin())

    def _mark_used(self, work: Tensor, used: Sequence[bool] | None) -> None:
        self._used.fill_(1.0)
        if used is None or all(used):
            return
        self._used.copy_(sent_up(torch.tensor(used, dtype=torch.float32), self._used.device))
        for slot, is_used in zip(self.buffer.layout.slots, used, strict=True):
            if not is_used:
                work[slot.offset : slot.stop] = 0.0

    def _used_anywhere(self) -> dict[str, Tensor]:
        """Return by name whether any rank has values, as scalars; after the first message only."""
        return dict(zip(self.buffer.names, (self._used > 0).unbind(), strict=True))

    def _plain_parts(self) -> Iterator[tuple[Slot, Tensor]]:
        """Yield each slot without factors, and its part of the message as a view."""
        parts = torch.split(self._plain_values, [slot.numel for slot in self._plain])
        return zip(self._plain, parts, strict=True)

    @override
    @torch.no_grad()
    def proceed(self) -> None:
        travel = self._travel
        if travel is None or travel.sound is not None:
            return
        first, second = self._messages()
        first.wait()
        travel.sound = sound = torch.isfinite(first.values).all()  # the same on all ranks
        used = self._used_anywhere()
        for one in self._factors:
            one.orthonormalise(sound)
            one.p.mul_(used[one.slot.name])  # with P = 0 nothing is sent and all of M is kept
            matrix = one.matrix(travel.work)
            torch.mm(matrix.T, one.p, out=one.next_q)
            second.round_(one.next_q)
            lost = matrix.addmm_(one.p, one.next_q.T, alpha=-1.0)  # not kept until all are sound
            least, greatest = lost.aminmax()  # NaN if there is one
            one.next_q.masked_fill_(~(greatest - least < torch.inf), torch.nan)  # tell all ranks
        self.tally.sent_bytes += second.begin()

    @override
    @torch.no_grad()
    def wait(self) -> None:
        self.proceed()
        travel, self._travel = self._travel, None
        assert travel is not None
        assert travel.sound is not None
        _, second = self._messages()
        second.wait()
        sound = travel.sound & torch.isfinite(second.values).all()
        used = self._used_anywhere()
        self._keep(travel.work, sound, used)
        average = travel.work.zero_()
        for one in self._factors:
            torch.mm(one.p, one.next_q.T, out=one.matrix(average))
        for slot, mean in self._plain_parts():
            torch.mul(mean, used[slot.name], out=average[slot.offset : slot.stop])
        if not self.buffer.keeps_all:
            average = average.view(self.buffer.ranks.size, -1)[self.buffer.ranks.rank]
        travel.out.copy_(average)
        scale_up(travel.out, travel.scale)
        travel.out.masked_fill_(~sound, torch.nan)
        self.step += 1

    def _keep(self, lost: Tensor, sound: Tensor, used: Mapping[str, Tensor]) -> None:
        """Keep the values that the next step depends on; nothing changes unless `sound`."""
        for one in self._factors:
            self._keep_of(one.slot, lost, sound)
            one.start_from(if_sound(sound, one.next_q, one.q))
        for slot in self._plain:
            self._keep_of(slot, lost, sound & used[slot.name])

    def _keep_of(self, slot: Slot, lost: Tensor, sound: Tensor) -> None:
        place = slice(slot.offset, slot.stop)
        kept = self._residual[place]
        kept.copy_(if_sound(sound, lost[place], kept))

    @override
    def common_state(self) -> State:
        if self._both is None:
            return {}
        return {"q": {one.slot.name: one.q.clone() for one in self._factors}}

    @override
    def own_state(self) -> State:
        return {} if self._both is None else {"residual": self.buffer.views(self._residual)}

    @override
    @torch.no_grad()
    def load_own(self, own: Mapping[str, Mapping[str, Tensor]]) -> None:
        for name, view in self.own_state().get("residual", {}).items():
            if name in own.get("residual", {}):
                view.copy_(own["residual"][name])

    @property
    @override
    def kept(self) -> list[Tensor]:
        if self._both is None:
            return []
        messages = (one.values for one in self._both)
        return [self._residual, *messages, *(one.q for one in self._factors)]

    @override
    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        self.step = step
        if any(name in state.get(kind, {}) for kind in state for name in self.buffer.names):
            self._messages()
        if self._both is None:
            return
        self._residual.zero_()
        self.load_own(state)
        for one in self._factors:
            q = state.get("q", {}).get(one.slot.name)
            if q is not None and q.shape == one.q.shape:  # another rank starts from a guess
                one.start_from(q.to(one.q))
