"""Attention of some rows to some keys, tile by tile, whose results over all keys are put together.

               keys of one rank                     acc    sum of exp(score - highest) value
             ┌──────┬──────┐                        highest, total   of each row, over the
    rows of  │ tile │ tile │   in any order  ──>    tiles so far
    this     ├──────┼──────┤
    rank     │ tile │ (out │   of sight: skipped)   result = acc / total
             └──────┴──────┘                        lse    = highest + log(total)

Backward computes each tile's weights again, exp(score - lse), so no matrix of all scores is ever
held. It is written in matrix products, in float32 at least: torch's kernels that return `lse` are
private, differ by device, and the one for CPUs says 0 of a row that sees no key.

Source: online softmax, arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_TILE = 256  # rows and keys: 256 KiB of scores for each sample and head


@dataclass(frozen=True, kw_only=True)
class Visible:
    """Which positions look at which.

    Attributes:
        mask: What `scaled_dot_product_attention` is given for the full sequence, of a shape that
            broadcasts to (..., H, S, S) with two dimensions or more; None where all is looked at.
        is_causal: Whether no position looks at later ones.
        length: Number S of positions; places from there on are padding.
    """

    mask: Tensor | None
    is_causal: bool
    length: int

    def of(self, rows: range, keys: range) -> Tensor | bool:
        """Return the mask of a tile; True where all of it is seen, False where nothing is."""
        if self.mask is not None:
            tile = _ranged(_ranged(self.mask, -2, rows), -1, keys)
            return bool(tile.any()) and tile if tile.dtype == torch.bool else tile
        if not self.is_causal or keys[-1] <= rows[0]:
            return True
        return keys[0] <= rows[-1]

    def hidden(self, rows: range, keys: range, device: torch.device) -> Tensor:
        """Return where keys are later than rows, shape (rows, keys)."""
        later = torch.arange(keys.start, keys.stop, device=device)
        return later > torch.arange(rows.start, rows.stop, device=device)[:, None]


def _ranged(mask: Tensor, dim: int, places: range) -> Tensor:
    size = mask.shape[dim]
    if size == 1:
        return mask
    missing = max(places.stop - size, 0)  # rows of padding look at what the last position does
    if not missing:
        return mask.narrow(dim, places.start, len(places))
    wanted = torch.arange(places.start, places.stop, device=mask.device).clamp_max(size - 1)
    return mask.index_select(dim, wanted)


@dataclass(frozen=True)
class _Tile:
    """A range of places in what a rank holds, and the positions there."""

    start: int
    places: range

    def of(self, tensor: Tensor) -> Tensor:
        """Return the rows of this tile, in float32 at least."""
        own = tensor.narrow(-2, self.start, len(self.places))
        return own.to(_wide(own.dtype))

    def within(self, tensor: Tensor) -> Tensor:
        """Return the rows of this tile, a view."""
        return tensor.narrow(-2, self.start, len(self.places))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _tiles(held: Sequence[range], length: int | None = None) -> Iterator[_Tile]:
    """Cut what a rank holds, a run of positions after the other, into tiles below `length`."""
    start = 0
    for run in held:
        stop = run.stop if length is None else min(run.stop, length)
        for first in range(run.start, stop, _TILE):
            places = range(first, min(first + _TILE, stop))
            yield _Tile(start + first - run.start, places)
        start += len(run)


class TiledAttention:
    """Attends with this rank's rows to the keys of one rank after the other.

    Queries are (..., G, R, S/W, D): R heads for each of G heads of keys. Rows and keys are runs of
    positions; a mask of each head is (..., G, R, S, S).
    """

    def __init__(
        self, query: Tensor, rows: Sequence[range], visible: Visible, scale: float
    ) -> None:
        self._query, self._rows, self._visible, self._scale = query, rows, visible, scale

    def start(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return what is known before any key is seen: acc, highest, total."""
        wide = _wide(self._query.dtype)
        shape = self._query.shape[:-1]
        acc = self._query.new_zeros((*shape, width), dtype=wide)
        highest = self._query.new_full((*shape, 1), -torch.inf, dtype=wide)
        return acc, highest, torch.zeros_like(highest)

    def see(
        self,
        state: tuple[Tensor, Tensor, Tensor],
        key: Tensor,
        value: Tensor,
        keys: Sequence[range],
    ) -> None:
        """Take one rank's keys (..., G, 1, S/W, D) into `state`, which is changed in place."""
        for tile, others, scores in self._scores(key, keys):
            acc, highest, total = (tile.within(one) for one in state)
            new = torch.maximum(highest, scores.amax(-1, keepdim=True))
            finite = new.masked_fill(new == -torch.inf, 0)
            weights = scores.sub_(finite).exp_()
            kept = (highest - finite).exp()
            acc.mul_(kept).add_(weights @ others.of(value))
            total.mul_(kept).add_(weights.sum(-1, keepdim=True))
            highest.copy_(new)

    @staticmethod
    def finish(state: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the result and lse; both are 0 in a row that sees no key."""
        acc, highest, total = state
        unseen = total == 0
        lse = torch.where(unseen, 0, highest + total.log())
        return acc / total.masked_fill(unseen, 1), lse

    def gradients(
        self,
        known: tuple[Tensor, Tensor, Tensor],
        key: Tensor,
        value: Tensor,
        keys: Sequence[range],
        of_query: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of one rank's keys and values by this rank's rows."""
        of_key = torch.zeros_like(key, dtype=_wide(key.dtype))
        of_value = torch.zeros_like(value, dtype=_wide(value.dtype))
        for tile, others, scores in self._scores(key, keys):
            grad, product, lse = (tile.of(one) for one in known)
            weights = scores.sub_(lse).exp_()
            others.within(of_value).add_(_of_groups(weights.mT @ grad))
            by_scores = (grad @ others.of(value).mT).sub_(product).mul_(weights).mul_(self._scale)
            tile.within(of_query).add_(by_scores @ others.of(key))
            others.within(of_key).add_(_of_groups(by_scores.mT @ tile.of(self._query)))
        return of_key, of_value

    def _scores(self, key: Tensor, keys: Sequence[range]) -> Iterator[tuple[_Tile, _Tile, Tensor]]:
        """Yield the scores of each tile that is not out of sight."""
        for tile in _tiles(self._rows):
            for others in _tiles(keys, self._visible.length):
                seen = self._visible.of(tile.places, others.places)
                if seen is False:
                    continue
                scores = (tile.of(self._query) @ others.of(key).mT).mul_(self._scale)
                yield tile, others, self._masked(scores, seen, tile.places, others.places)

    def _masked(self, scores: Tensor, seen: Tensor | bool, rows: range, keys: range) -> Tensor:
        if isinstance(seen, Tensor):
            if seen.dtype == torch.bool:
                return scores.masked_fill_(~seen, -torch.inf)
            return scores.add_(seen)
        if self._visible.is_causal and keys[-1] > rows[0]:
            return scores.masked_fill_(self._visible.hidden(rows, keys, scores.device), -torch.inf)
        return scores


def _of_groups(grad: Tensor) -> Tensor:
    """Sum over the heads of queries that look at one head of keys."""
    return grad.sum(-3, keepdim=True)
