"""Attention of a sequence in parts: heads for positions, and back (Ulysses).

    q, k, v   (B, H, S/W, D)  ──all-to-all──>  (B, H/W, S, D)  ──any attention──>
    result    (B, H, S/W, D)  <──all-to-all──  (B, H/W, S, D)

A rank attends with H / W heads over the whole sequence, so every mask, window and bias is what it
is on a single device; one that differs by head is cut by heads. Where keys have fewer heads than
there are ranks, each is sent to all ranks whose queries look at it. Where heads cannot be shared
out, each rank attends with its own positions to all keys, which are gathered.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_shard.context_parallel.crossings import exchange
from lightning_shard.context_parallel.operations import gathered_for_part
from lightning_shard.context_parallel.sequence_part import RULES, SequencePart, part_of
from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor
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
    if part.place > 2:  # cut along a batch
        return _attend_apart(
            func, part, (query, key, value), attn_mask, dropout_p, is_causal, kwargs
        )
    if part.place == 1:
        return NotImplemented
    mask = full_tensor(attn_mask)
    options = kwargs | {"dropout_p": dropout_p}
    drawn = drawn_apart(part.group, part.local.device) if dropout_p else nullcontext()
    if _shares_heads(part, key, value, kwargs.get("enable_gqa", False)):
        return _by_heads(func, part, (key, value), mask, options | {"is_causal": is_causal}, drawn)
    return _by_rows(func, part, (key, value), mask, options, is_causal, drawn)


def _shares_heads(part: SequencePart, key: Any, value: Any, is_grouped: bool) -> bool:
    """Whether all three are cut alike, and query heads can be shared out to the ranks."""
    others = [part_of(key), part_of(value)]
    if part.local.ndim < 4 or any(
        one is None or not one.is_like(part) or one.local.ndim != part.local.ndim for one in others
    ):
        return False
    num_heads = part.local.shape[_HEADS]
    is_even = all(num_heads % one.shape[_HEADS] == 0 for one in (key, value))
    is_alike = is_even if is_grouped else {one.shape[_HEADS] for one in (key, value)} == {num_heads}
    return is_alike and num_heads % part.group.size == 0


def _by_heads(
    func: Any,
    part: SequencePart,
    others: tuple[Any, Any],
    mask: Tensor | None,
    options: dict[str, Any],
    drawn: AbstractContextManager[None],
) -> Tensor:
    group = part.group
    num_heads = part.local.shape[_HEADS]
    heads = part.local.ndim + _HEADS
    query, key, value = (
        exchange(one, heads, heads + 1, group)
        for one in (
            part.local,
            *(_repeated(one.part.local, num_heads, group.size) for one in others),
        )
    )
    if mask is not None and mask.ndim >= 3 and mask.shape[_HEADS] == num_heads > 1:
        mask = part.split(mask, mask.ndim + _HEADS)
    elif mask is not None:
        mask = part.shared(mask)
    with drawn:
        mixed = func(query, key, value, attn_mask=mask, **options)
    result: Tensor = part.widen(exchange(mixed, heads + 1, heads, group))
    return result


def _repeated(local: Tensor, num_queries: int, num_ranks: int) -> Tensor:
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
    key, value = (gathered_for_part(one, part) for one in others)
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


def _attend_apart(
    func: Any,
    part: SequencePart,
    operands: tuple[Any, Any, Any],
    mask: Any,
    dropout_p: float,
    is_causal: bool,
    options: dict[str, Any],
) -> Any:
    """Attend within what each rank has all positions of: other samples, or windows."""
    local = [part.operand(one) for one in (*operands, mask)]
    if any(one is NotImplemented for one in local):
        return NotImplemented
    query, key, value, mask = local
    drawn = drawn_apart(part.group, part.local.device) if dropout_p else nullcontext()
    with drawn:
        mixed = func(
            query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, **options
        )
    return part.widen(mixed)


RULES["scaled_dot_product_attention"] = attend
