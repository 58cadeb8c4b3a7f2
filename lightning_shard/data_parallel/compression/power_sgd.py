"""Matrices travel as products of two thin ones, found by one power iteration a step.

    begin     P = M Q         average P      M = gradient + what was lost, (m, n); Q from last time
    proceed   orthogonalise P
              Q = M' P        average Q      what is lost: M - P Q' of this rank
    wait      average M = P Q'       the next Q: this one, each column scaled to 1 at most

Both averages are sums of linear functions of M, so they need no gathering and no second loss.
Vectors, and matrices too small to gain, travel as they are with P; nothing of them is lost, but
what another compressor has lost of them, and a checkpoint has brought, travels with them once.
P also tells which tensors have values on any rank; of one that has none, nothing is taken away.
Source: PowerSGD, arXiv:1905.13727.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.backends.pending import Pending
from lightning_shard.backends.traffic import ring_share
from lightning_shard.data_parallel.compression.buffer import FlatBuffer
from lightning_shard.data_parallel.compression.compressor import (
    Compressor,
    Exchange,
    State,
    if_sound,
)
from lightning_shard.errors import ConfigError
from lightning_shard.layout.flat import Slot


class PowerSGD(Compressor):
    """Approximations of low rank, with error feedback and warm start.

    Args:
        rank: Of the approximation; 1 to 4 are usual.
        warmup_steps: Steps at the start that are dense.
        seed: Of the first guess, the same on all ranks.
    """

    def __init__(self, rank: int = 2, warmup_steps: int = 0, seed: int = 0) -> None:
        if rank < 1 or warmup_steps < 0:
            raise ConfigError(
                f"PowerSGD needs rank >= 1 and warmup_steps >= 0, got rank={rank!r}, "
                f"warmup_steps={warmup_steps!r}."
            )
        self.rank = rank
        self.warmup_steps = warmup_steps
        self.seed = seed

    @override
    def exchange(self, buffer: FlatBuffer) -> Exchange:
        return LowRankExchange(self, buffer)


@dataclass(eq=False)
class Factors:
    """One matrix's place, and its factors.

    Attributes:
        slot: Its place in the buffer.
        rows: Its first dimension; the others make up the columns.
        q: Shape (columns, rank): the next power iteration starts from it; no value is over 1.
        p: Shape (rows, rank): orthonormal columns; a view of what is averaged before.
        next_q: Shape (columns, rank): a view of what is averaged.
    """

    slot: Slot
    q: Tensor
    p: Tensor
    next_q: Tensor

    def matrix(self, full: Tensor) -> Tensor:
        """The matrix, a view of a flat tensor."""
        return full[self.slot.offset : self.slot.stop].view(self.slot.shape[0], -1)

    def orthonormalise(self, sound: Tensor) -> None:
        """Make the columns of P of length 1 and at right angles; any such ones unless `sound`."""
        p = if_sound(sound, self.p)
        self.p.copy_(torch.linalg.qr(_scaled(p, otherwise=p)).Q)

    def start_from(self, q: Tensor) -> None:
        """Begin the next iteration with `q`, shape (columns, rank).

        Only the directions of its columns matter, since P is made orthonormal. Their lengths must
        not stay: they would grow with each gradient, and one that is large enough would make all
        later P overflow.
        """
        self.q.copy_(_scaled(q, otherwise=self.q))


class LowRankExchange(Exchange):
    """Averages one buffer by PowerSGD.

    Args:
        settings: Rank, warm-up, seed.
        buffer: The buffer.
    """

    def __init__(self, settings: PowerSGD, buffer: FlatBuffer) -> None:
        super().__init__(buffer)
        self._settings = settings
        slots = buffer.layout.slots
        self._thin = [slot for slot in slots if _pays(slot, settings.rank)]
        self._plain = [slot for slot in slots if not _pays(slot, settings.rank)]
        self._residual = self._first = self._second = torch.empty(0)  # all from the first average
        self._plain_values = self._used = self._first
        self._factors: list[Factors] = []
        self._is_allocated = False
        self._work: Tensor | None = None  # M of this rank, then the average
        self._out: Tensor | None = None
        self._scale = 1.0
        self._sound: Tensor | None = None
        self._pending: Pending | None = None
        self._has_proceeded = False

    def _allocate(self) -> None:
        """Make what is kept; of frozen parameters that is nothing."""
        if self._is_allocated:
            return
        self._is_allocated = True
        numel, device = self.buffer.numel, self.buffer.device
        self._residual = torch.zeros(numel, dtype=torch.float32, device=device)
        ranks = [_rank(slot, self._settings.rank) for slot in self._thin]
        num_p = sum(slot.shape[0] * rank for slot, rank in zip(self._thin, ranks, strict=True))
        num_q = sum(_columns(slot) * rank for slot, rank in zip(self._thin, ranks, strict=True))
        num_plain = sum(slot.numel for slot in self._plain)
        num_slots = len(self.buffer.layout.slots)
        # P of all, the plain ones, and 1 for each tensor that this rank has values for.
        self._first = self._residual.new_zeros(num_p + num_plain + num_slots)
        self._second = self._residual.new_zeros(num_q)  # Q of all
        self._plain_values = self._first[num_p : num_p + num_plain]
        self._used = self._first[num_p + num_plain :]
        self._factors = self._cut(ranks)

    def _cut(self, ranks: list[int]) -> list[Factors]:
        random = torch.Generator().manual_seed(self._settings.seed + self.buffer.number)
        factors, p_end, q_end = [], 0, 0
        for slot, rank in zip(self._thin, ranks, strict=True):
            p_shape, q_shape = (slot.shape[0], rank), (_columns(slot), rank)
            p = self._first[p_end : p_end + prod(p_shape)].view(p_shape)
            next_q = self._second[q_end : q_end + prod(q_shape)].view(q_shape)
            q = torch.randn(q_shape, generator=random).to(self.buffer.device)
            factors.append(Factors(slot, _scaled(q, otherwise=q), p, next_q))
            p_end, q_end = p_end + p.numel(), q_end + q.numel()
        return factors

    @override
    def passes(self, values: Tensor, used: Sequence[bool] | None = None) -> bool:
        if self.step >= self._settings.warmup_steps:
            return False
        self._count(self.buffer.dense_numel * 4)
        self.step += 1
        return True

    @override
    @torch.no_grad()
    def begin(self, values: Tensor, out: Tensor, used: Sequence[bool] | None = None) -> None:
        self._allocate()
        self._out, self._scale, self._has_proceeded = out, self.loss_scale(), False
        self._work = work = values.to(torch.float32, copy=True).div_(self._scale)
        self._mark_used(work, used)
        for one in self._factors:
            matrix = one.matrix(work).add_(one.matrix(self._residual))
            torch.mm(matrix, one.q, out=one.p)
        for slot, part in self._plain_parts():
            place = slice(slot.offset, slot.stop)
            torch.add(work[place], self._residual[place], out=part)
        ranks = self.buffer.ranks
        self._pending = ranks.all_reduce(self._first, "avg", async_op=True)
        sent = sum(ring_share(2 * part.numel(), ranks.size) for part in (self._first, self._second))
        self._count(sent * 4)

    def _mark_used(self, work: Tensor, used: Sequence[bool] | None) -> None:
        self._used.fill_(1.0)
        if used is None or all(used):
            return
        self._used.copy_(torch.tensor(used, dtype=torch.float32))
        for slot, is_used in zip(self.buffer.layout.slots, used, strict=True):
            if not is_used:
                work[slot.offset : slot.stop] = 0.0

    def _used_anywhere(self) -> dict[str, Tensor]:
        """By name, once the first message has come: whether any rank has values; scalars."""
        names = [slot.name for slot in self.buffer.layout.slots]
        return dict(zip(names, (self._used > 0).unbind(), strict=True))

    def _plain_parts(self) -> Iterator[tuple[Slot, Tensor]]:
        """What travels as it is: each slot, and its part of the message, a view."""
        parts = torch.split(self._plain_values, [slot.numel for slot in self._plain])
        return zip(self._plain, parts, strict=True)

    @override
    @torch.no_grad()
    def proceed(self) -> None:
        if self._has_proceeded:
            return
        self._has_proceeded = True
        assert self._pending is not None
        assert self._work is not None
        self._pending.wait()
        self._sound = sound = torch.isfinite(self._first).all()  # the same on all ranks
        used = self._used_anywhere()
        for one in self._factors:
            one.orthonormalise(sound)
            one.p.mul_(used[one.slot.name])  # with P = 0 nothing is sent and all of M is kept
            matrix = one.matrix(self._work)
            torch.mm(matrix.T, one.p, out=one.next_q)
            lost = matrix.addmm_(one.p, one.next_q.T, alpha=-1.0)  # not kept until all are sound
            least, greatest = lost.aminmax()  # NaN if there is one
            one.next_q.masked_fill_(~(greatest - least < torch.inf), torch.nan)  # tell all ranks
        self._pending = self.buffer.ranks.all_reduce(self._second, "avg", async_op=True)

    @override
    @torch.no_grad()
    def wait(self) -> None:
        self.proceed()
        assert self._pending is not None
        assert self._work is not None
        assert self._sound is not None
        assert self._out is not None
        self._pending.wait()
        sound, used = self._sound & torch.isfinite(self._second).all(), self._used_anywhere()
        self._keep(self._work, sound, used)
        average = self._work.zero_()
        for one in self._factors:
            torch.mm(one.p, one.next_q.T, out=one.matrix(average))
        for slot, mean in self._plain_parts():
            torch.mul(mean, used[slot.name], out=average[slot.offset : slot.stop])
        if not self.buffer.keeps_all:
            average = average.view(self.buffer.ranks.size, -1)[self.buffer.ranks.rank]
        self._out.copy_(average).mul_(self._scale).masked_fill_(~sound, torch.nan)
        self._work = self._out = self._sound = self._pending = None
        self.step += 1

    def _keep(self, lost: Tensor, sound: Tensor, used: Mapping[str, Tensor]) -> None:
        """Take up what the next step depends on; all stays as it is unless `sound`."""
        for one in self._factors:
            kept = one.matrix(self._residual)
            kept.copy_(if_sound(sound, one.matrix(lost), kept))
            one.start_from(if_sound(sound, one.next_q, one.q))
        for slot in self._plain:  # has travelled
            self._residual[slot.offset : slot.stop].masked_fill_(sound & used[slot.name], 0.0)

    @override
    @torch.no_grad()
    def state(self) -> State:
        if not self._is_allocated:
            return {}
        residual = self._residual.clone()
        self.buffer.ranks.all_reduce(residual, "avg").wait()
        q = {one.slot.name: one.q.clone() for one in self._factors}
        return {"residual": self.buffer.views(residual), "q": q}

    @property
    @override
    def kept(self) -> list[Tensor]:
        if not self._is_allocated:
            return []
        return [self._residual, self._first, self._second, *(one.q for one in self._factors)]

    @override
    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        self.step = step
        if any(name in state.get(kind, {}) for kind in state for name in self.buffer.names):
            self._allocate()
        if not self._is_allocated:
            return
        self._residual.zero_()
        for name, view in self.buffer.views(self._residual).items():
            if name in state.get("residual", {}):
                view.copy_(state["residual"][name])
        for one in self._factors:
            q = state.get("q", {}).get(one.slot.name)
            if q is not None and q.shape == one.q.shape:  # another rank starts from a guess
                one.start_from(q.to(one.q))


def _scaled(columns: Tensor, otherwise: Tensor) -> Tensor:
    """Each column divided by its greatest value; of `otherwise` where that is 0 or not finite."""
    greatest = columns.abs().amax(0)
    return torch.where((greatest > 0) & (greatest < torch.inf), columns / greatest, otherwise)


def _columns(slot: Slot) -> int:
    return prod(slot.shape[1:])


def _rank(slot: Slot, rank: int) -> int:
    return min(rank, slot.shape[0], _columns(slot))


def _pays(slot: Slot, rank: int) -> bool:
    """Whether the factors of a matrix are smaller than it."""
    if len(slot.shape) < 2 or not slot.numel:
        return False
    return _rank(slot, rank) * (slot.shape[0] + _columns(slot)) < slot.numel
