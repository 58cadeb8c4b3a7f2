"""torch's MultiheadAttention with its heads split over the ranks, and its fast paths off.

    query ──enter──> Wq (own heads) ─┐
    key   ──enter──> Wk (own heads) ─┼─> attention ──> Wo (own inputs) ──leave──> output
    value ──enter──> Wv (own heads) ─┘        └─> weights: mean over all heads, or all heads' own

The layer's own forward hands full matrices to a function that checks their size, so it is written
anew here. torch's fused encoder kernel, which knows of no ranks, is turned off by its own switches.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_shard.backends.collectives import Collectives
from lightning_shard.tensor_parallel.regions import gather_copies, reduce_from_region
from lightning_shard.tensor_parallel.sequence import saved_as_slice
from lightning_shard.tensor_parallel.styles import ParameterCut


class AttentionContext(Protocol):
    """The attributes of a `LayerContext` that an attention needs."""

    @property
    def rank(self) -> int:
        """Rank of this process in the tensor-parallel group."""

    @property
    def group(self) -> Collectives:
        """Group of the tensor-parallel ranks."""

    @property
    def enter(self) -> Callable[[Tensor], Tensor]:
        """Function that the layer's inputs enter the region by."""

    @property
    def leave(self) -> Callable[[Tensor], Tensor]:
        """Function that its result leaves the region by, before the bias."""


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


class ParallelAttention:
    """The parallel forward of `nn.MultiheadAttention`."""

    _tensor_parallel_place: AttentionContext

    def forward(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with this rank's heads; arguments and results as in `nn.MultiheadAttention`."""
        place = self._tensor_parallel_place
        is_batched = query.dim() == 3
        if not is_batched:
            query, key, value = (one.unsqueeze(0) for one in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = _transposed(query, key, value)
        projections = zip((query, key, value), _weights(self), _biases(self), strict=True)
        q, k, v = (  # each (B, heads / W, T or S, head width)
            heads_of(_projected(place.enter(one), weight, bias), self.head_dim)
            for one, weight, bias in projections
        )
        mask = added_masks(q, attn_mask, key_padding_mask, place.rank, place.group.size)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            mixed, weights = attend_with_weights(q, k, v, mask, dropout)
            weights = _of_all_heads(place, weights, average=average_attn_weights)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        output = place.leave(self.out_proj.without_bias(mixed.transpose(1, 2).flatten(2)))
        if self.out_proj.bias is not None:
            output = output + self.out_proj.bias
        if self.training:
            output = _as_torch_lays_it(output)
        if not is_batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return (output if self.batch_first else output.transpose(0, 1)), weights


def _transposed(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put the batch first; equal tensors stay one tensor, which enters the region once."""
    first = query.transpose(0, 1)
    second = first if key is query else key.transpose(0, 1)
    third = second if value is key else value.transpose(0, 1)
    return first, second, third


def _as_torch_lays_it(output: Tensor) -> Tensor:
    """Let (B, T, C) lie in memory as (T, B, C): a dropout of it draws its zeros in this order."""
    return output.transpose(0, 1).contiguous().transpose(0, 1)


def _weights(module: Any) -> tuple[Tensor, ...]:
    if module.in_proj_weight is not None:
        return tuple(module.in_proj_weight.chunk(3))
    return module.q_proj_weight, module.k_proj_weight, module.v_proj_weight


def _biases(module: Any) -> tuple[Tensor | None, ...]:
    return (None,) * 3 if module.in_proj_bias is None else tuple(module.in_proj_bias.chunk(3))


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


def _of_all_heads(place: AttentionContext, weights: Tensor, *, average: bool) -> Tensor:
    """Return the attention weights of all ranks' heads: their mean, or each head's own."""
    if average:
        return reduce_from_region(weights.mean(1) / place.group.size, place.group)
    return gather_copies(weights, 1, place.group)


def _projected(entered: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with saved_as_slice(entered):
        return F.linear(entered, weight, bias)
