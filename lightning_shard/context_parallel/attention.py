"""Attention of a sequence in parts: heads for positions, and back (Ulysses); else in a ring.

    q, k, v   (B, H, S/W, D)  ──all-to-all──>  (B, H/U, S U/W, D)  ──attention──>
    result    (B, H, S/W, D)  <──all-to-all──  (B, H/U, S U/W, D)

U is the largest number of neighbours that can share the heads. Where it is W, a rank attends with H
/ W heads over the full sequence, so every mask is what it is on a single device. Where it is less,
the keys of the other W / U ranks come by in a ring. What a ring cannot do (dropout of weights,
gradients of a bias ...) each rank does for its own positions and all gathered keys.

Attention in a ring: a rank's queries stay, and the keys and values of all ranks come by.

    step 0      rank 0: K0 V0      rank 1: K1 V1      rank 2: K2 V2
    step 1      rank 0: K2 V2      rank 1: K0 V0      rank 2: K1 V1       each passes on to the next

Where positions do not look at later ones, the first rank would have little to do and the last one
all. So the ranks swap halves of their rows before and after, each with an early and a late one:

    rows 0 1 2 3 4 5 of 3 ranks     [0 1] [2 3] [4 5]   <──>   [0 5] [1 4] [2 3]

A rank attends tile by tile, in any order, and puts the results over all keys together:

               keys of one rank                     acc    sum of exp(score - highest) value
             ┌──────┬──────┐                        highest, total   of each row, over the
    rows of  │ tile │ tile │                        tiles so far
    this     ├──────┼──────┤
    rank     │ tile │ (out │   of sight: skipped)   result = acc / total
             └──────┴──────┘                        lse    = highest + log(total)

Backward passes keys and values round once more and computes each tile's weights again, so no matrix
of all scores is ever held. Tiles are matrix products in float32 at least: torch's kernels that
return `lse` are private, differ by device, and the one for CPUs says 0 of a row that sees no key.

Source: Ring Attention, arXiv:2310.01889; balanced as in arXiv:2311.09431 and Llama 3,
arXiv:2407.21783, section 3.3.2. Tiles: arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.pending import Pending
from lightning_shard.context_parallel.crossings import (
    RankSubset,
    cut_sequence,
    exchange,
    exchange_together,
    heads_and_ring,
)
from lightning_shard.context_parallel.sequence_part import RULES, SequencePart, part_of
from lightning_shard.data_parallel.torch_private import untraced
from lightning_shard.errors import ConfigError
from lightning_shard.tensor_parallel import layers
from lightning_shard.tensor_parallel.dim_sharded_operations import combined
from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor
from lightning_shard.tensor_parallel.randomness import drawn_apart

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


@untraced
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Visible, scale: float, ring: RankSubset
) -> Tensor:
    """Attend with this rank's positions to those of all W ranks of a ring; each must call.

    Args:
        query: Shape (..., H, S/W, D): the slice of the ring's rank r is its r-th of the sequence.
        key: Shape (..., G, S/W, D), where G divides H.
        value: Shape (..., G, S/W, Dv).
        visible: Which positions look at which, of this rank's heads.
        scale: Factor of the scores.
        ring: The W ranks.

    Returns:
        Shape (..., H, S/W, Dv), in the format of the queries.
    """
    result: Tensor = _Ring.apply(query, key, value, visible, scale, ring)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True)
class _Places:
    """Which rows each rank of a ring has while it attends: runs of `size`, in ascending order."""

    ring: RankSubset
    size: int
    is_balanced: bool

    @classmethod
    def of(cls, ring: RankSubset, num_rows: int, visible: Visible) -> "_Places":
        differs = visible.is_causal or (visible.mask is not None and visible.mask.shape[-2] > 1)
        is_balanced = differs and num_rows % 2 == 0
        return cls(ring, num_rows // 2 if is_balanced else num_rows, is_balanced)

    def owners(self, *, of_slices: bool = False) -> list[int]:
        """Return the rank that has each run, as attention or as slices of the sequence have it."""
        size = self.ring.size
        if not self.is_balanced:
            return list(range(size))
        return [run // 2 if of_slices else min(run, 2 * size - 1 - run) for run in range(2 * size)]

    def rows(self, rank: int) -> list[range]:
        """Return the positions of the rows that a rank has while it attends."""
        return [
            range(run * self.size, (run + 1) * self.size)
            for run, owner in enumerate(self.owners())
            if owner == rank
        ]

    def entered(self, tensor: Tensor) -> Tensor:
        """Return the rows (..., S/W, D) that this rank attends with, where it gives its slice."""
        return self._moved(tensor, self.owners(of_slices=True), self.owners())

    def left(self, tensor: Tensor) -> Tensor:
        """Return this rank's slice of rows, where it gives those it attends with."""
        return self._moved(tensor, self.owners(), self.owners(of_slices=True))

    def _moved(self, tensor: Tensor, held: list[int], wanted: list[int]) -> Tensor:
        if not self.is_balanced:
            return tensor.contiguous()
        runs, rank = range(len(held)), self.ring.rank
        own = dict(zip([r for r in runs if held[r] == rank], tensor.chunk(2, -2), strict=True))
        shape = (*tensor.shape[:-2], self.size, tensor.shape[-1])
        leaving = [own[run] for run in sorted(own, key=lambda run: wanted[run])]
        sent = torch.stack(leaving).contiguous()
        received = torch.empty_like(sent)
        mine = sorted((run for run in runs if wanted[run] == rank), key=lambda run: held[run])
        numel = sent[0].numel()
        self.ring.all_to_all(
            received.view(-1),
            sent.view(-1),
            output_split_sizes=self._counts([held[run] for run in mine], numel),
            input_split_sizes=self._counts([wanted[run] for run in own], numel),
        ).wait()
        found = dict(zip(mine, received.view(2, *shape), strict=True))
        return torch.cat([found[run] for run in sorted(found)], dim=-2)

    def _counts(self, ranks: list[int], numel: int) -> list[int]:
        return [ranks.count(rank) * numel for rank in range(self.ring.size)]


def _passed(tensor: Tensor, step: int, ring: RankSubset) -> tuple[Tensor, Pending]:
    """Begin to send a flat tensor `step` ranks on, and to receive what comes from as far back."""
    received = torch.empty_like(tensor)
    sizes = [0] * ring.size
    to, back = sizes.copy(), sizes.copy()
    to[(ring.rank + step) % ring.size] = back[(ring.rank - step) % ring.size] = tensor.numel()
    started = ring.all_to_all(
        received, tensor, output_split_sizes=back, input_split_sizes=to, async_op=True
    )
    return received, started


@dataclass(frozen=True)
class _KeysAndValues:
    """Keys and values in one flat tensor, as they travel."""

    flat: Tensor
    shapes: tuple[torch.Size, torch.Size]

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> "_KeysAndValues":
        return cls(torch.cat([key.reshape(-1), value.reshape(-1)]), (key.shape, value.shape))

    def both(self) -> tuple[Tensor, Tensor]:
        key, value = torch.split(self.flat, [shape.numel() for shape in self.shapes])
        return key.view(self.shapes[0]), value.view(self.shapes[1])


def _visits(own: _KeysAndValues, ring: RankSubset) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Yield step, rank, keys and values of each rank, with the next ones on their way."""
    here = own
    for step in range(ring.size):
        coming = _passed(here.flat, 1, ring) if step < ring.size - 1 else None
        yield step, (ring.rank - step) % ring.size, *here.both()
        if coming is not None:
            received, started = coming
            started.wait()
            here = _KeysAndValues(received, here.shapes)


def _grouped(query: Tensor, num_groups: int) -> Tensor:
    """Return (..., H, S, D) as (..., G, H / G, S, D)."""
    grouped: Tensor = query.unflatten(-3, (num_groups, -1))  # type: ignore[no-untyped-call]
    return grouped


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Visible,
        scale: float,
        ring: RankSubset,
    ) -> Tensor:
        places = _Places.of(ring, query.shape[-2], visible)
        query, key, value = (places.entered(one) for one in (query, key, value))
        ctx.visible, ctx.scale, ctx.places = visible, scale, places
        tiled = _tiled(ctx, query, key)
        state = tiled.start(value.shape[-1])
        for _, source, keys, values in _visits(_KeysAndValues.of(key, value), ring):
            rows = places.rows(source)
            tiled.see(state, keys.unsqueeze(-3), values.unsqueeze(-3), rows)
        result, lse = tiled.finish(state)
        result = result.flatten(-4, -3).to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        return places.left(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        is_differentiated = torch.is_grad_enabled()
        with torch.no_grad():
            grads = _Ring._gradients(ctx, grad)
        return *(not_twice(grads) if is_differentiated else grads), None, None, None

    @staticmethod
    def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value, result, lse = ctx.saved_tensors
        places: _Places = ctx.places
        tiled, groups = _tiled(ctx, query, key), key.shape[-3]
        grad = places.entered(grad)
        wide = lse.dtype
        product = (grad.to(wide) * result.to(wide)).sum(-1, keepdim=True)
        known = (_grouped(grad, groups), _grouped(product, groups), lse)
        of_query = torch.zeros_like(_grouped(query, groups), dtype=wide)
        of_pair: Tensor | None = None
        for step, source, keys, values in _visits(_KeysAndValues.of(key, value), places.ring):
            rows = places.rows(source)
            found = tiled.gradients(known, keys.unsqueeze(-3), values.unsqueeze(-3), rows, of_query)
            flat = _KeysAndValues.of(*found).flat
            of_pair = flat if of_pair is None else of_pair.add_(_home(flat, step, key, places.ring))
        assert of_pair is not None
        of_key, of_value = _KeysAndValues(of_pair, (key.shape, value.shape)).both()
        of_all = (of_query.flatten(-4, -3), of_key, of_value)
        return tuple(
            places.left(found.to(one.dtype))
            for found, one in zip(of_all, (query, key, value), strict=True)
        )


class _NotTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise ConfigError(
            "A gradient is differentiated once more, as by a penalty of it, through attention "
            "whose keys and values travel between the ranks, which has no second derivative; "
            "expected ranks that can share the heads. Use fewer ranks for each sequence, or "
            "strategy='zero2'."
        )


def not_twice(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return gradients whose own gradient is an error, and not zero in silence.

    torch's `once_differentiable` takes them for constants where what comes in is one.
    """
    anchor = torch.zeros((), requires_grad=True)
    made: tuple[Tensor, ...] = _NotTwice.apply(anchor, *grads)  # type: ignore[no-untyped-call]
    return made


def _home(flat: Tensor, step: int, like: Tensor, ring: RankSubset) -> Tensor:
    """Send gradients to the rank whose keys they are of, and receive those of the own keys."""
    received, started = _passed(flat.to(like.dtype), -step, ring)
    started.wait()
    return received.to(flat.dtype)


def _tiled(ctx: Any, query: Tensor, key: Tensor) -> TiledAttention:
    places: _Places = ctx.places
    groups, visible = key.shape[-3], ctx.visible
    if visible.mask is not None:
        visible = replace(visible, mask=_mask_of_groups(visible.mask, query.shape[-3], groups))
    return TiledAttention(
        _grouped(query, groups), places.rows(places.ring.rank), visible, ctx.scale
    )


def _mask_of_groups(mask: Tensor, num_heads: int, num_groups: int) -> Tensor:
    """Return a mask whose dimension of heads, where it has one, is two."""
    if mask.ndim < 3:
        return mask
    return _grouped(mask, num_groups) if mask.shape[-3] == num_heads > 1 else mask.unsqueeze(-3)


_HEADS, _ROWS = -3, -2


def attend(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Any:
    """Do scaled_dot_product_attention; each rank drops out weights of its own heads or rows."""
    part = part_of(query)
    if part is None or part.num_blocks > 1:
        return NotImplemented

    def attended(*own: Any, is_causal: bool = is_causal) -> Any:  # once all operands fit
        with drawn_apart(part.group, part.local.device) if dropout_p else nullcontext():
            return func(*own, dropout_p=dropout_p, is_causal=is_causal, **kwargs)

    if part.place > 2:  # cut along a batch, or windows: each rank has all positions of its own
        return combined(attended, query, (query, key, value, attn_mask), {})
    if part.place == 1:
        return NotImplemented
    mask = full_tensor(attn_mask)
    num_sharing = _num_sharing(part, key, value, kwargs.get("enable_gqa", False))
    if num_sharing == part.group.size:
        return _by_heads(attended, part, (key, value), mask)
    operands = (part.local, key.part.local, value.part.local) if num_sharing else ()
    visible = Visible(mask=mask, is_causal=is_causal, length=part.width)
    if num_sharing and _goes_round(operands, visible, dropout_p):
        return _by_ring(part, operands, num_sharing, visible, kwargs.get("scale"))
    return _by_rows(partial(attended, is_causal=False), part, (key, value), mask, is_causal)


def _num_sharing(part: SequencePart, key: Any, value: Any, is_grouped: bool) -> int:
    """Return how many ranks can share out the heads; 0 where the three are not cut alike."""
    others = [part_of(key), part_of(value)]
    if part.local.ndim < 4 or any(
        one is None or not one.is_like(part) or one.local.ndim != part.local.ndim for one in others
    ):
        return 0
    num_heads = part.local.shape[_HEADS]
    is_even = all(num_heads % one.shape[_HEADS] == 0 for one in (key, value))
    is_alike = is_even if is_grouped else {one.shape[_HEADS] for one in (key, value)} == {num_heads}
    return math.gcd(num_heads, part.group.size) if is_alike else 0


def _by_heads(
    attended: Any, part: SequencePart, others: tuple[Any, Any], mask: Tensor | None
) -> Tensor:
    heads = own_heads((part, *(one.part for one in others)))
    mixed = attended(*heads, own_heads_of_mask(mask, part))
    mixed = F.pad(mixed, (0, 0, 0, part.padding)) if part.padding else mixed
    result: Tensor = part.widen(_positions_for_heads(mixed, part.group))
    return result


def own_heads(parts: Sequence[SequencePart]) -> list[Tensor]:
    """Return this rank's heads of the full sequence, of queries, keys and values."""
    rows = parts[0].local.ndim + _ROWS
    received = _heads_for_positions([one.local for one in parts], parts[0].group)
    return [part.without_padding(one, rows) for part, one in zip(parts, received, strict=True)]


def own_heads_of_mask(mask: Any, part: SequencePart) -> Any:
    """Return what this rank's heads need of a mask of all heads; what is no tensor as it is."""
    if not isinstance(mask, Tensor):
        return mask
    if mask.ndim >= 3 and mask.shape[_HEADS] == part.local.shape[_HEADS] > 1:
        return cut_sequence(full_tensor(mask), mask.ndim + _HEADS, part.group)
    return part.shared(full_tensor(mask))


def _heads_for_positions(
    operands: Sequence[Tensor], ranks: Collectives | RankSubset
) -> tuple[Tensor, ...]:
    """Return queries, keys and values of this rank's heads, at the positions of all `ranks`."""
    num_heads, heads = operands[0].shape[_HEADS], operands[0].ndim + _HEADS
    repeated = [repeated_heads(one, num_heads, ranks.size) for one in operands]
    return exchange_together(repeated, heads, heads + 1, ranks)


def _positions_for_heads(mixed: Tensor, ranks: Collectives | RankSubset) -> Tensor:
    return exchange(mixed, mixed.ndim + _ROWS, mixed.ndim + _HEADS, ranks)


def _goes_round(operands: Sequence[Tensor], visible: Visible, dropout_p: float) -> bool:
    """Whether a ring can do it."""
    mask = visible.mask
    if mask is not None:
        is_alone = not (visible.is_causal or (mask.requires_grad and torch.is_grad_enabled()))
        if not is_alone or mask.ndim < 2 or mask.device != operands[0].device:
            return False
    lengths = {one.shape[_ROWS] for one in operands}
    dtypes = {one.dtype for one in operands}
    is_cast = torch.is_autocast_enabled(operands[0].device.type)
    heads = {one.shape[_HEADS] for one in operands[1:]}
    return dropout_p == 0.0 and len(lengths) == len(heads) == 1 and (len(dtypes) == 1 or is_cast)


def _by_ring(
    part: SequencePart,
    operands: Sequence[Tensor],
    num_sharing: int,
    visible: Visible,
    scale: float | None,
) -> Tensor:
    sharing, ring = heads_and_ring(part.group, num_sharing)
    device, num_heads = part.local.device, operands[0].shape[_HEADS]
    if torch.is_autocast_enabled(device.type):
        operands = [one.to(torch.get_autocast_dtype(device.type)) for one in operands]
    mask = visible.mask
    if num_sharing > 1:
        operands = _heads_for_positions(operands, sharing)
        if mask is not None and mask.ndim >= 3 and mask.shape[_HEADS] == num_heads:
            visible = replace(visible, mask=mask.chunk(num_sharing, _HEADS)[sharing.rank])
    query, key, value = operands
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    mixed = ring_attention(query, key, value, visible, factor, ring)
    if num_sharing > 1:
        mixed = _positions_for_heads(mixed, sharing)
    result: Tensor = part.widen(mixed)
    return result


def repeated_heads(local: Tensor, num_queries: int, num_ranks: int) -> Tensor:
    """Repeat heads of keys until each rank gets those that its queries look at."""
    num_heads = local.shape[_HEADS]
    if num_heads == num_queries:
        return local
    times = math.lcm(num_heads, num_ranks) // num_heads
    return local.repeat_interleave(times, dim=_HEADS) if times > 1 else local


def _by_rows(
    attended: Any,
    part: SequencePart,
    others: tuple[Any, Any],
    mask: Tensor | None,
    is_causal: bool,
) -> Any:
    key, value = (part.full_operand(one) for one in others)
    if key is NotImplemented or value is NotImplemented:
        return NotImplemented
    if is_causal:
        mask = _causal_rows(part, key)
    elif mask is not None and mask.ndim >= 2 and mask.shape[_ROWS] > 1:
        mask = part.split(mask, mask.ndim + _ROWS)
    elif mask is not None:
        mask = part.shared(mask)
    return part.widen(attended(part.local, key, value, mask))


def _causal_rows(part: SequencePart, key: Tensor) -> Tensor:
    """Return this rank's rows of a causal mask; True is looked at."""
    num_rows = part.local.shape[_ROWS]
    rows = torch.arange(num_rows, device=key.device) + part.group.rank * num_rows
    return torch.arange(key.shape[_ROWS], device=key.device) <= rows[:, None]


RULES["scaled_dot_product_attention"] = attend


_FORWARD = signature(F.multi_head_attention_forward)
_NEVER = ("bias_k", "bias_v", "static_k", "static_v")


def multi_head_attention(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Do `multi_head_attention_forward`; arguments and results as there, (L, N, E) first.

    torch computes it in one function, which takes full tensors only; here it is written in
    operations that have rules.
    """
    bound = _FORWARD.bind(*args, **kwargs)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    others = any(bound.arguments[name] is not None for name in _NEVER)
    if part_of(given.query) is None or given.query.ndim != 3 or given.add_zero_attn or others:
        return NotImplemented
    q, k, v = _projected(given)
    mask = layers.added_masks(q, full_tensor(given.attn_mask), full_tensor(given.key_padding_mask))
    dropout = given.dropout_p if given.training else 0.0
    mixed, shown = layers.attend(q, k, v, mask, dropout, need_weights=given.need_weights)
    if shown is not None and given.average_attn_weights:
        shown = shown.mean(1)
    joined = mixed.transpose(1, 2).flatten(2).transpose(0, 1)  # (L, N, E)
    return F.linear(joined, given.out_proj_weight, given.out_proj_bias), shown


def _projected(given: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, each (N, heads, L, width)."""
    apart = given.q_proj_weight, given.k_proj_weight, given.v_proj_weight
    fused = None if given.use_separate_proj_weight else given.in_proj_weight
    projections = layers.projections(fused, apart, given.in_proj_bias)
    width = given.embed_dim_to_check // given.num_heads
    q, k, v = (
        layers.heads_of(F.linear(one, *layer).transpose(0, 1), width)
        for one, layer in zip((given.query, given.key, given.value), projections, strict=True)
    )
    return q, k, v


RULES[F.multi_head_attention_forward.__name__] = multi_head_attention
