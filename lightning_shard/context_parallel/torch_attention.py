"""The attention of torch's `nn.MultiheadAttention` for a sequence in parts, as torch computes it.

    query (L/W, N, E) ──Wq──> own positions ──> scaled_dot_product_attention ──Wo──> (L/W, N, E)

torch computes it in one function, which takes full tensors only; here it is written in operations
that have rules.
"""

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


def multi_head_attention(
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """Do `multi_head_attention_forward`; arguments and results as there, (L, N, E) first."""
    others = (bias_k, bias_v, static_k, static_v)
    if (
        part_of(query) is None
        or query.ndim != 3
        or add_zero_attn
        or any(o is not None for o in others)
    ):
        return NotImplemented
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    if not use_separate_proj_weight:
        weights = in_proj_weight.chunk(3)  # type: ignore[union-attr]
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    width = embed_dim_to_check // num_heads
    q, k, v = (  # each (N, heads, L, width)
        heads_of(F.linear(one, weight, bias).transpose(0, 1), width)
        for one, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    mask = _mask(q, full_tensor(attn_mask), full_tensor(key_padding_mask))
    dropout = dropout_p if training else 0.0
    mixed, shown = None, None
    if need_weights:
        mixed, shown = attend_with_weights(q, k, v, mask, dropout)
        shown = shown.mean(1) if average_attn_weights else shown
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    joined = mixed.transpose(1, 2).flatten(2).transpose(0, 1)  # (L, N, E)
    return F.linear(joined, out_proj_weight, out_proj_bias), shown


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
