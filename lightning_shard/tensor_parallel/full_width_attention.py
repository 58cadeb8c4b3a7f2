"""Rules of the operations of an attention whose heads are sharded over the ranks.

(B, H, T, W)   q @ k.transpose(-2, -1), softmax(-1), @ v     each rank with its heads
scaled_dot_product_attention(q, k, v)         the same
(T, T), (B, 1, T, T)                                         a mask for all heads: as it is
(H, T, T)                                                    a bias of each head: its own part
"""

from contextlib import nullcontext
from typing import Any

from torch import Tensor

from lightning_shard.tensor_parallel.dim_sharded_tensor import DimShardedTensor, Part
from lightning_shard.tensor_parallel.randomness import drawn_apart


def combined(func: Any, like: DimShardedTensor, args: Any, kwargs: Any) -> Any:
    """Do an operation on the parts that broadcasts its operands along the sharded dimension."""
    part = like.part
    operands = [part.operand(arg) for arg in args]
    if any(operand is NotImplemented for operand in operands):
        return NotImplemented
    result = func(*operands, **kwargs)
    if result is part.local:
        return like
    if not isinstance(result, Tensor) or result.device != like.device:
        return NotImplemented  # on another device the group may be unable to gather it
    return part.widen(result, result.ndim - part.place)


def softmax(func: Any, sharded: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Take the softmax of rows that are full on each rank."""
    part: Part = sharded.part
    if not isinstance(dim, int) or dim % sharded.ndim == part.dim:
        return NotImplemented
    return part.widen(func(part.local, dim, *args, **kwargs))


def matmul(func: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """Multiply the matrices of each head."""
    like = left if isinstance(left, DimShardedTensor) else right
    if like.part.place <= 2 or kwargs or min(left.ndim, right.ndim) < 2:
        return NotImplemented
    return combined(func, like, (left, right), {})


def attend(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Any:
    """Do scaled_dot_product_attention; each rank drops out weights of its own heads."""
    if not all(isinstance(one, DimShardedTensor) for one in (query, key, value)):
        return NotImplemented
    parts: list[Part] = [one.part for one in (query, key, value)]
    part = parts[0]
    is_grouped = kwargs.get("enable_gqa", False)
    if part.place <= 2 or not all(
        one.is_like(part) and (is_grouped or one.width == part.width) for one in parts
    ):
        return NotImplemented
    mask = part.operand(attn_mask)
    if mask is NotImplemented:
        return NotImplemented
    local = [one.local for one in parts]
    options = {"attn_mask": mask, "dropout_p": dropout_p, "is_causal": is_causal}
    with drawn_apart(part.group, part.local.device) if dropout_p else nullcontext():
        return part.widen(func(*local, **options, **kwargs))


def einsum(func: Any, equation: Any, *operands: Any) -> Any:
    """Do einsum for each head: the sharded letter is one of the result's."""
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return NotImplemented
    inputs, _, output = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if [len(term) for term in names] != [one.ndim for one in operands]:
        return NotImplemented
    terms = list(zip(names, operands, strict=True))
    letter, part = next(
        (term[one.part.dim], one.part) for term, one in terms if isinstance(one, DimShardedTensor)
    )
    local = [_term(part, term.find(letter), one) for term, one in terms]
    if letter not in output or any(one is NotImplemented for one in local):
        return NotImplemented
    return part.widen(func(equation, *local), output.index(letter))


def _term(part: Part, dim: int, value: Tensor) -> Any:
    """Return the own part of a term along a dimension, or all of it where it has none (-1)."""
    if isinstance(value, DimShardedTensor):
        other = value.part
        own = (other.dim, other.width, other.num_blocks)
        is_alike = own == (dim, part.width, part.num_blocks) and other.group is part.group
        return other.local if is_alike else NotImplemented
    if dim < 0 or value.shape[dim] == 1:
        return part.shared(value)
    return part.split(value, dim) if value.shape[dim] == part.width else NotImplemented
