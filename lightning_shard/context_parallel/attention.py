"""Attention of a sequence in parts: heads for positions, and back (Ulysses); else in a ring.

    q, k, v   (B, H, S/W, D)  ──all-to-all──>  (B, H/U, S U/W, D)  ──attention──>
    result    (B, H, S/W, D)  <──all-to-all──  (B, H/U, S U/W, D)

U is the largest number of neighbours that can share the heads. Where it is W, a rank attends with H
/ W heads over the full sequence, so every mask is what it is on a single device. Where it is less,
the keys of the other W / U ranks come by in a ring. What a ring cannot do (dropout of weights,
gradients of a bias ...) each rank does for its own positions and all gathered keys.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from lightning_shard.backends.collectives import Collectives
from lightning_shard.context_parallel.crossings import (
    RankSubset,
    cut_sequence,
    exchange,
    exchange_together,
    heads_and_ring,
)
from lightning_shard.context_parallel.ring import Visible, ring_attention
from lightning_shard.context_parallel.sequence_part import RULES, SequencePart, part_of
from lightning_shard.tensor_parallel.dim_sharded_operations import combined
from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor
from lightning_shard.tensor_parallel.layers import added_masks, attend_with_weights, heads_of
from lightning_shard.tensor_parallel.randomness import drawn_apart

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
    options = kwargs | {"dropout_p": dropout_p}
    drawn = drawn_apart(part.group, part.local.device) if dropout_p else nullcontext()
    if part.place > 2:  # cut along a batch, or windows: each rank has all positions of its own

        def apart(*own: Any) -> Any:
            with drawn:  # once all operands fit
                return func(*own, is_causal=is_causal, **options)

        return combined(apart, query, (query, key, value, attn_mask), {})
    if part.place == 1:
        return NotImplemented
    mask = full_tensor(attn_mask)
    num_sharing = _num_sharing(part, key, value, kwargs.get("enable_gqa", False))
    if num_sharing == part.group.size:
        return _by_heads(func, part, (key, value), mask, options | {"is_causal": is_causal}, drawn)
    operands = (part.local, key.part.local, value.part.local) if num_sharing else ()
    visible = Visible(mask=mask, is_causal=is_causal, length=part.width)
    if num_sharing and _goes_round(operands, visible, dropout_p):
        return _by_ring(part, operands, num_sharing, visible, kwargs.get("scale"))
    return _by_rows(func, part, (key, value), mask, options, is_causal, drawn)


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
    func: Any,
    part: SequencePart,
    others: tuple[Any, Any],
    mask: Tensor | None,
    options: dict[str, Any],
    drawn: AbstractContextManager[None],
) -> Tensor:
    query, key, value = own_heads((part, *(one.part for one in others)))
    mask = own_heads_of_mask(mask, part)
    with drawn:
        mixed = func(query, key, value, attn_mask=mask, **options)
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
    func: Any,
    part: SequencePart,
    others: tuple[Any, Any],
    mask: Tensor | None,
    options: dict[str, Any],
    is_causal: bool,
    drawn: AbstractContextManager[None],
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
    with drawn:
        return part.widen(func(part.local, key, value, attn_mask=mask, **options))


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
    mask = added_masks(q, full_tensor(given.attn_mask), full_tensor(given.key_padding_mask))
    dropout = given.dropout_p if given.training else 0.0
    mixed, shown = None, None
    if given.need_weights:
        mixed, shown = attend_with_weights(q, k, v, mask, dropout)
        shown = shown.mean(1) if given.average_attn_weights else shown
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    joined = mixed.transpose(1, 2).flatten(2).transpose(0, 1)  # (L, N, E)
    return F.linear(joined, given.out_proj_weight, given.out_proj_bias), shown


def _projected(given: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, each (N, heads, L, width)."""
    weights = (given.q_proj_weight, given.k_proj_weight, given.v_proj_weight)
    if not given.use_separate_proj_weight:
        weights = given.in_proj_weight.chunk(3)
    biases = (None,) * 3 if given.in_proj_bias is None else given.in_proj_bias.chunk(3)
    width = given.embed_dim_to_check // given.num_heads
    q, k, v = (
        heads_of(F.linear(one, weight, bias).transpose(0, 1), width)
        for one, weight, bias in zip(
            (given.query, given.key, given.value), weights, biases, strict=True
        )
    )
    return q, k, v


RULES[F.multi_head_attention_forward.__name__] = multi_head_attention
