"""The attention of torch's `nn.MultiheadAttention` for a sequence in parts, as torch computes it.

    query (L/W, N, E) ──Wq──> own positions ──> scaled_dot_product_attention ──Wo──> (L/W, N, E)

torch computes it in one function, which takes full tensors only; here it is written in operations
that have rules.
"""

from inspect import signature
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from lightning_shard.context_parallel.sequence_part import RULES, part_of
from lightning_shard.tensor_parallel.attention import (
    additive_mask,
    attend_with_weights,
    heads_of,
)
from lightning_shard.tensor_parallel.dim_sharded_tensor import full_tensor

_FORWARD = signature(F.multi_head_attention_forward)
_NEVER = ("bias_k", "bias_v", "static_k", "static_v")


def multi_head_attention(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Do `multi_head_attention_forward`; arguments and results as there, (L, N, E) first."""
    bound = _FORWARD.bind(*args, **kwargs)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    others = any(bound.arguments[name] is not None for name in _NEVER)
    if part_of(given.query) is None or given.query.ndim != 3 or given.add_zero_attn or others:
        return NotImplemented
    q, k, v = _projected(given)
    mask = _mask(q, full_tensor(given.attn_mask), full_tensor(given.key_padding_mask))
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


def _mask(query: Tensor, attn_mask: Tensor | None, padding_mask: Tensor | None) -> Tensor | None:
    """Return both masks as one that is added to the scores; it broadcasts to (N, heads, L, S)."""
    mask = None if attn_mask is None else additive_mask(attn_mask, query)
    if mask is not None and mask.ndim == 3:  # (N * heads, L, S)
        mask = mask.view(query.shape[0], -1, *mask.shape[1:])
    if padding_mask is not None:
        padding = additive_mask(padding_mask, query)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask


RULES[F.multi_head_attention_forward.__name__] = multi_head_attention
