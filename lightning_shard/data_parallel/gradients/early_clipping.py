"""Clips what a compressor keeps something of, before it is sent.

    dense, half formats, int8    gradient ──average──> clip                   as on one device
    error feedback, momentum     gradient ──clip──> + what is kept ──average──>

Clipped after the average, a spike would stay in what is kept, and come back for as many steps. So
each rank's own gradient is clipped, as Deep Gradient Compression does (arXiv:1712.01887, section
3.2), but all by one factor, of the norm of their average. That is nearly the norm of sums of
elements by random signs, few for many (Charikar, Chen, Farach-Colton, Finding frequent items in
data streams, 2002). A dense warm-up averages gradients, which are clipped again.
"""

from collections.abc import Iterable, Sequence

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.traffic import ring_share
from lightning_shard.data_parallel.gradients.flat_gradients import FlatGradients

_SMALL = 1e-6  # as in torch's `clip_grad_norm_`
_COLUMNS = 8192  # the norm is 0.8 % off, by its standard deviation
# the limit, p of the norm or None for each element, and what is clipped together
_Rule = tuple[float, float | None, frozenset[nn.Parameter]]


class EarlyClipping:
    """Clips by the rule by which user code has clipped the gradients of the last step."""

    def __init__(self, gradients: Sequence[FlatGradients], ranks: Collectives) -> None:
        self._gradients = [
            (one, one.exchange)
            for one in gradients
            if one.exchange is not None and one.exchange.keeps
        ]
        self._ranks = ranks
        self._signs: Tensor | None = None  # of sums, once there are any
        self._rule: _Rule | None = None
        self._has_clipped = self._was_asked = False  # in this step

    def expect(
        self, limit: float | None, norm_type: float | None, params: Iterable[nn.Parameter] = ()
    ) -> None:
        """Clip from the next backward on; None as the limit for not at all."""
        is_known = limit is not None and norm_type in (None, 2.0)
        self._rule = (limit or 0.0, norm_type, frozenset(params)) if is_known else None
        for gradients, exchange in self._gradients:
            gradients.waits_for_end = is_known  # for the norm of all
            exchange.clips_by = None

    def ask(self, params: Iterable[nn.Parameter], limit: float, norm_type: float | None) -> bool:
        """Return whether this step's gradients were clipped already; those of later steps are."""
        if not self._gradients:
            return False
        before = self._rule
        self.expect(limit, norm_type, params)
        self._was_asked = True
        was_so = self._has_clipped and before == self._rule
        return was_so and not any(exchange.was_dense for _, exchange in self._gradients)

    def end_step(self) -> None:
        """See whether a step was clipped for nothing: then user code clips some steps only."""
        if self._has_clipped and not self._was_asked:
            self.expect(None, None)
            self._gradients = []  # which come as they are from now on
            rank_zero_warn(
                "A step was taken without clip_gradients after steps with it. Its gradients had "
                "been clipped as theirs were, before they were sent, since the compressor keeps "
                "some of them. From now on clipping works on what has come: what a spike leaves in "
                "the compressor stays. Clip in every step, or by Trainer(gradient_clip_val=...)."
            )
        self._has_clipped = self._was_asked = False

    @torch.no_grad()
    def prepare(self) -> None:
        """Tell exchanges how to clip what they send at a backward's end; each rank must call."""
        clips_by: Tensor | float | None = None
        trained = {p for one, _ in self._gradients for p in one.flat.params if p.requires_grad}
        if self._gradients and self._rule is not None and trained <= self._rule[2]:
            limit, norm_type, _ = self._rule
            clips_by = limit if norm_type is None else limit / (self._norm() + _SMALL)
            self._has_clipped = True
        for _, exchange in self._gradients:
            exchange.clips_by = clips_by

    def _norm(self) -> Tensor:
        """Return the norm of the average without the loss scale, shape (), alike on all ranks."""
        exchange, sums = self._gradients[0][1], self._sums()
        scale = exchange.buffer.loss_scale()
        if scale is not None:
            sums /= scale
        # uncompressed gradients are clipped without it
        exchange.tally.sent_bytes += ring_share(2 * sums.nbytes, self._ranks.size)
        self._ranks.all_reduce(sums, "avg").wait()
        norm: Tensor = sums.norm()
        return norm

    def _sums(self) -> Tensor:
        """Return sums of a gradient's elements by fixed random signs, shape (_COLUMNS,)."""
        params = [param for one, _ in self._gradients for param in one.flat.params]
        grads = [grad for one, _ in self._gradients for grad in one.sent_next]
        end = sum(param.numel() for param in params) // _COLUMNS + 1 + _COLUMNS
        if self._signs is None:
            generator = torch.Generator().manual_seed(0)
            signs = torch.randint(0, 2, (3 * end,), generator=generator) * 2.0 - 1.0
            self._signs = signs.to(self._gradients[0][1].buffer.device)
        sums, start = self._signs.new_zeros(_COLUMNS), 0
        for param, grad in zip(params, grads, strict=True):
            row, column = divmod(start, _COLUMNS)
            start += param.numel()
            if grad is not None:
                ends = column, -start % _COLUMNS
                rows = nn.functional.pad(grad.flatten().float(), ends).view(-1, _COLUMNS)
                # products of signs, of which no two places have the same: r + c and 2 r + c
                rows = rows * self._signs.as_strided(rows.shape, (1, 1), row)
                rows *= self._signs.as_strided(rows.shape, (2, 1), end + 2 * row)
                sums += rows.sum(0)
        return sums
