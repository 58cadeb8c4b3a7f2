"""torch's MultiheadAttention with its heads split over the ranks, and its fast paths off.

    query ──enter──> Wq (own heads) ─┐
    key   ──enter──> Wk (own heads) ─┼─> attention ──> Wo (own inputs) ──leave──> output
    value ──enter──> Wv (own heads) ─┘        └─> weights: mean over all heads, or all heads' own

The layer's own forward hands full matrices to a function that checks their size, so it is written
anew here. torch's fused encoder kernel, which knows of no ranks, is turned off by its own switches.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_shard.tensor_parallel.styles import ParameterCut


def is_plain_attention(module: nn.Module) -> bool:
    """Whether a layer is torch's attention, and not one with a forward or keys of its own."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and not is_parametrized(module)
        and not is_parametrized(module.out_proj)
        and module.bias_k is None
        and not module.add_zero_attn
    )


def attention_cuts(module: nn.MultiheadAttention) -> tuple[ParameterCut, ...]:
    """Return the cuts of torch's attention: by heads, and of the output layer by its inputs."""
    cuts = (
        ParameterCut(name="in_proj_weight", dim=0, num_blocks=3),
        ParameterCut(name="in_proj_bias", dim=0, num_blocks=3),
        *(ParameterCut(name=f"{one}_proj_weight", dim=0) for one in "qkv"),
        ParameterCut(name="out_proj.weight", dim=1),
    )
    return tuple(cut for cut in cuts if cut.name in dict(module.named_parameters()))


def fast_paths(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield the switches of torch's fused encoder, and the values that turn it off."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            yield module, "activation_relu_or_gelu", 0
        elif isinstance(module, nn.TransformerEncoder):
            yield module, "use_nested_tensor", False


def heads_of(features: Tensor, width: int) -> Tensor:
    """Return (B, heads, T, width) of features (B, T, C)."""
    return features.view(*features.shape[:-1], -1, width).transpose(1, 2)


def added_masks(
    query: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    rank: int = 0,
    num_ranks: int = 1,
) -> Tensor | None:
    """Return both masks as one that is added to the scores; it broadcasts to (B, heads, T, S).

    Args:
        query: Shape (B, heads, T, width), of the heads of `rank`.
        attn_mask: Shape (T, S), or (B * heads of all ranks, T, S).
        key_padding_mask: Shape (B, S).
        rank: Rank whose heads they are.
        num_ranks: Number of ranks that share the heads.
    """
    mask = None
    if attn_mask is not None:
        mask = additive_mask(attn_mask, query)
        if mask.dim() == 3:  # (B * all heads, T, S)
            mask = mask.view(query.shape[0], -1, *mask.shape[1:])
            mask = mask.chunk(num_ranks, dim=1)[rank]
    if key_padding_mask is not None:
        padding = additive_mask(key_padding_mask, query)[:, None, None, :]
        mask = padding if mask is None else mask + padding
    return mask


def additive_mask(mask: Tensor, query: Tensor) -> Tensor:
    """Return a mask that is added for one whose True means "not this one"."""
    if mask.dtype != torch.bool:
        return mask.to(query.dtype)
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask, -math.inf)


def attend_with_weights(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """Attend, and return each head's weights (B, heads, T, S) besides."""
    scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-2, -1)  # (B, heads, T, S)
    weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
    return weights @ value, weights
