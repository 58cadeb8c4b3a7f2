"""The parallel forms of layers: a layer's own class, with its forward split over the ranks.

    colwise    x ──enter──> [ x W0 | x W1 ] ──leave──> y        each rank has columns of the result
    rowwise    x ──enter──> x0 W0 + x1 W1 ──leave──> y          each rank has a partial sum
    vocab      ids ───────> rows of the own part, else 0 ──leave──> y
    attention  q, k, v ──enter──> own heads ──Wo──leave──> y      and the weights of all heads
    shared     x ──enter──> x W[own head]             the ranks that share a head compute the same
    experts    x ──enter──> each expert's part ──leave──> y       the router's weights enter as well
    unsplit    x ──enter──> y ──leave──> own features of y        every rank computes the same

A layer's class becomes a subclass made here, and its own again in the end, so that hooks, names and
`isinstance` go on working. A bias that belongs to the full result is added after the sum, once.
torch's fused encoder kernel, which knows of no ranks, is turned off by its own switches.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map_only

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.extensions import SharedByCopies, extend_class, give_class_back
from lightning_shard.core.states import Asker, asker, having, setting
from lightning_shard.data_parallel.memory.inner_tensors import is_composed
from lightning_shard.data_parallel.torch_private import is_called_plainly
from lightning_shard.data_parallel.units.unsharding import looks_at_values
from lightning_shard.tensor_parallel.full_view import FullView, seeing, set_view
from lightning_shard.tensor_parallel.regions import (
    copy_to_region,
    gather_copies,
    reduce_from_region,
)
from lightning_shard.tensor_parallel.rounded import (
    has_scales,
    is_rounded,
    product_without_bias,
)
from lightning_shard.tensor_parallel.sequence import saved_as_slice
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


def projections(
    fused: Tensor | None, apart: tuple[Any, Any, Any], bias: Tensor | None
) -> list[tuple[Any, Any]]:
    """Return weight and bias of queries, keys and values, which are fused or `apart`."""
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return list(zip(apart if fused is None else fused.chunk(3), biases, strict=True))


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


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    *,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attend, and return each head's weights (B, heads, T, S) besides, if they are asked for."""
    if not need_weights:
        options: Any = {"attn_mask": mask, "dropout_p": dropout}
        return F.scaled_dot_product_attention(query, key, value, **options), None
    scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-2, -1)  # (B, heads, T, S)
    weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
    return weights @ value, weights


Crossing = Callable[[Tensor], Tensor]
"""A function of an activation where a parallel region begins or ends."""

_PLACE = "_tensor_parallel_place"


@dataclass(frozen=True, kw_only=True)
class Watched:
    """How a layer computes while hooks look at it, which see full activations.

    this rank's ──widen──► hooks, enter──► layer ──leave, hooks ──narrow──► this rank's
    """

    widen: Crossing
    enter: Crossing
    leave: Crossing
    narrow: Crossing


@dataclass(frozen=True, kw_only=True)
class LayerContext(SharedByCopies):
    """The context in which a layer of the split model computes."""

    enter: Crossing
    leave: Crossing
    group: Collectives
    num_heads: int
    alike: Callable[[Tensor], AbstractContextManager[None]]
    view: FullView
    watched: Watched | None
    scales: Any
    takes: Callable[[], None] | None
    gives: Callable[[Any], None] | None


def _with_own_weights(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a layer's own forward see the parts that this rank has of its weights."""

    @having(asker, value=Asker.LAYER)
    @wraps(forward)
    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        view: FullView = getattr(self, _PLACE).view
        params = self.__dict__["_parameters"]
        parts = view.given(params)
        instead = {name: params[name] for name in parts}
        params.update(parts)
        before, view.is_own = view.is_own, True
        try:
            with has_scales(params.get("weight"), getattr(self, _PLACE).scales):
                return forward(self, *args, **kwargs)
        finally:
            view.is_own = before
            params.update(instead)

    return own


class _Watched:
    def _call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
        place: LayerContext = getattr(self, _PLACE)
        watched, call = place.watched, super()._call_impl  # type: ignore[misc]
        if place.takes is not None:
            place.takes()
        if watched is None or is_called_plainly(self, looks_at_values):
            result = call(*args, **kwargs)
        else:
            args, kwargs = tree_map_only(Tensor, watched.widen, (args, kwargs))
            inside = replace(place, enter=watched.enter, leave=watched.leave)
            with setting(self, **{_PLACE: inside}):
                result = tree_map_only(Tensor, watched.narrow, call(*args, **kwargs))
        if place.gives is not None:
            place.gives(result)
        return result


class _Colwise(_Watched):
    @_with_own_weights
    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        place: LayerContext = getattr(self, _PLACE)
        entered = place.enter(input)
        with saved_as_slice(entered):
            result = super().forward(entered)  # type: ignore[misc]
        return place.leave(result)


class _Rowwise(_Watched):
    @_with_own_weights
    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002
        place: LayerContext = getattr(self, _PLACE)
        own = super().forward  # type: ignore[misc]
        total = place.leave(_product(self, own, place.enter(input)))
        return total if self.bias is None else total + self.bias


class _Vocab(_Watched):
    @_with_own_weights
    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002
        place: LayerContext = getattr(self, _PLACE)
        first = place.group.rank * self.weight.shape[0]
        local = input - first
        is_on_other_ranks = (local < 0) | (local >= self.weight.shape[0])
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < self.weight.shape[0]:
            padding = None
        with setting(self, padding_idx=padding):
            rows = super().forward(local.masked_fill(is_on_other_ranks, 0))  # type: ignore[misc]
        return place.leave(rows.masked_fill(is_on_other_ranks.unsqueeze(-1), 0))


class _Attention(_Watched):
    @_with_own_weights
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
        place: LayerContext = getattr(self, _PLACE)
        is_batched = query.dim() == 3
        if not is_batched:
            query, key, value = (one.unsqueeze(0) for one in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = _transposed(query, key, value)
        apart = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        layers = projections(self.in_proj_weight, apart, self.in_proj_bias)
        q, k, v = (  # each (B, heads / W, T or S, head width)
            heads_of(_projected(place.enter(one), *layer), self.head_dim)
            for one, layer in zip((query, key, value), layers, strict=True)
        )
        mask = added_masks(q, attn_mask, key_padding_mask, place.group.rank, place.group.size)
        dropout = self.dropout if self.training else 0.0
        mixed, weights = attend(q, k, v, mask, dropout, need_weights=need_weights)
        if weights is not None:
            weights = (  # of all ranks' heads: their mean, or each head's own
                reduce_from_region(weights.mean(1) / place.group.size, place.group)
                if average_attn_weights
                else gather_copies(weights, 1, place.group)
            )
        output = place.leave(self.out_proj.without_bias(mixed.transpose(1, 2).flatten(2)))
        if self.out_proj.bias is not None:
            output = output + self.out_proj.bias
        if self.training:  # as torch lays it: a dropout of it draws its zeros in this order
            output = output.transpose(0, 1).contiguous().transpose(0, 1)
        if not is_batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return (output if self.batch_first else output.transpose(0, 1)), weights


def _transposed(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put the batch first; equal tensors stay one tensor, which enters the region once."""
    first = query.transpose(0, 1)
    second = first if key is query else key.transpose(0, 1)
    third = second if value is key else value.transpose(0, 1)
    return first, second, third


def _projected(entered: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with saved_as_slice(entered):
        return F.linear(entered, weight, bias)


class _AttentionOutput:
    @_with_own_weights
    def without_bias(self: Any, mixed: Tensor) -> Tensor:
        return F.linear(mixed, self.weight)


class _Shared(_Watched):
    @_with_own_weights
    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002
        place: LayerContext = getattr(self, _PLACE)
        width = self.weight.shape[0] // place.num_heads
        first = place.group.rank * place.num_heads // place.group.size * width
        own = slice(first, first + width)
        # The copies' gradients are summed over the ranks, each of which knows those of its head.
        weight = copy_to_region(self.weight, place.group)[own]
        bias = None if self.bias is None else copy_to_region(self.bias, place.group)[own]
        return place.leave(_projected(place.enter(input), weight, bias))


class _Experts(_Watched):
    @_with_own_weights
    def forward(self: Any, input: Tensor, *routing: Any, **options: Any) -> Tensor:  # noqa: A002
        place: LayerContext = getattr(self, _PLACE)
        entered = [
            copy_to_region(one, place.group)
            if isinstance(one, Tensor) and one.is_floating_point()
            else one
            for one in routing
        ]
        result = super().forward(place.enter(input), *entered, **options)  # type: ignore[misc]
        return place.leave(result)


class _Unsplit(_Watched):
    def forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        place: LayerContext = getattr(self, _PLACE)
        entered = place.enter(input)
        with place.alike(entered):
            result = super().forward(entered, *args, **kwargs)  # type: ignore[misc]
        return place.leave(result)


class _Replica:
    """A layer with its own forward, whose gradient is summed by a hook."""


_FORMS: dict[str, type] = {
    "colwise": _Colwise,
    "rowwise": _Rowwise,
    "vocab": _Vocab,
    "attention": _Attention,
    "attention_output": _AttentionOutput,
    "shared": _Shared,
    "experts": _Experts,
    "replica": _Replica,
    "unsplit": _Unsplit,
    "unsplit_shared": _Unsplit,
    "shared_tail": _Unsplit,
}


def split_layer(module: nn.Module, form: str, place: LayerContext) -> None:
    """Give a layer, whose parameters have been cut, its parallel forward."""
    setattr(module, _PLACE, place)
    set_view(module, place.view)
    extend_class(module, form.capitalize(), _FORMS[form], seeing(place.view.names))


def unsplit_layer(module: nn.Module) -> None:
    """Give a layer its own forward back."""
    if is_split(module):
        if isinstance(module, _Attention):
            unsplit_layer(module.get_submodule("out_proj"))
        delattr(module, _PLACE)
        set_view(module, None)
        give_class_back(module, _FORMS.values())


def is_split(module: nn.Module) -> bool:
    """Whether a layer has a parallel forward."""
    return _PLACE in module.__dict__


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a layer is linear, and has no other forward of its own than one that rounds."""
    own = getattr(type(module), "forward", None)
    is_plain = is_transposed(module) or own is nn.Linear.forward
    return has_weight(module) and (is_plain or is_rounded(module))


def has_weight(module: nn.Module) -> bool:
    """Whether a layer's weight is a parameter, and not computed as by `weight_norm`."""
    weight = module._parameters.get("weight")
    return weight is not None and not is_composed(weight)


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer keeps its weight as (in, out), as GPT-2's Conv1D does."""
    return type(module).__name__.endswith("Conv1D") and hasattr(module, "nf")


def _product(module: Any, forward: Any, input: Tensor) -> Tensor:  # noqa: A002
    """Return a linear layer's result without its bias."""
    if is_transposed(module):
        return torch.matmul(input, module.weight)
    if forward.__func__ is not nn.Linear.forward:  # one that rounds
        return product_without_bias(module, forward, input)
    return F.linear(input, module.weight)
