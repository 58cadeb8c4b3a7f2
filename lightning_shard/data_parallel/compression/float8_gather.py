"""Weights of layers in float8, which travel as the layers round them.

    shard, exact ──rounded by the weight's scale──> codes ──all-gather──> weight ──layer──> codes

A layer rounds its weight by a scale of the greatest magnitude in it, or in each of its rows. Ranks
round their shards by those of all ranks, which one reduction finds for all weights of a step. What
has the greatest code is decoded to the greatest magnitude, so that the layer, which rounds what it
is given once more, finds the same scale and the same codes.
Source: the float8 all-gather of FSDP2, torchao.float8.fsdp_utils.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.layout import FlatLayout, ShardSlice
from lightning_shard.core.modules import hookable
from lightning_shard.data_parallel.compression.quantized_gather import GatherDType, ShardCodec
from lightning_shard.errors import ConfigError

_LEAST = 1e-12  # torchao's: smaller magnitudes have its scale


@dataclass(frozen=True)
class Float8Weight:
    """How a layer rounds its weight.

    Attributes:
        dtype: The format of its codes.
        by_rows: Whether each row has a scale of its own, or the weight one.
        powers_of_two: Whether scales are rounded down to powers of two.
    """

    dtype: torch.dtype
    by_rows: bool
    powers_of_two: bool

    def tables(self, greatest: Tensor) -> "_Tables":
        """Return what greatest magnitudes, (S,), mean for codes."""
        top = torch.finfo(self.dtype).max
        scales = (top / greatest.double().clamp(min=_LEAST)).float()
        if self.powers_of_two:
            scales = torch.exp2(torch.floor(torch.log2(scales)))
        return _Tables(greatest, scales, self.codes(greatest * scales).float())

    def codes(self, scaled: Tensor) -> Tensor:
        """Return values, multiplied by their scales, as codes."""
        top = torch.finfo(self.dtype).max
        return scaled.clamp(-top, top).to(self.dtype)


class _Tables(NamedTuple):
    """Of each scale of a weight, (S,): the greatest magnitude, the scale, the former's code."""

    greatest: Tensor
    scales: Tensor
    tops: Tensor


def float8_weights(model: nn.Module) -> dict[nn.Parameter, Float8Weight]:
    """Return how weights are rounded that layers in float8 use, and no others."""
    uses: dict[nn.Parameter, set[Float8Weight | None]] = {}
    for module in hookable(model):
        for name, param in module._parameters.items():
            if param is not None:
                uses.setdefault(param, set()).add(_rounded(module) if name == "weight" else None)
    return {param: one for param, (one, *others) in uses.items() if one is not None and not others}


def _rounded(module: nn.Module) -> Float8Weight | None:
    """Return how a layer rounds its weight in forward and backward; None where it does not."""
    config: Any = getattr(module, "config", None)
    if not isinstance(module, nn.Linear) or not hasattr(config, "cast_config_weight"):
        return None
    casts = config.cast_config_weight, config.cast_config_weight_for_grad_input
    if any(one.scaling_type.value != "dynamic" for one in casts):
        return None
    by_rows = casts[0].scaling_granularity.value == "axiswise"
    return Float8Weight(casts[0].target_dtype, by_rows, config.round_scales_to_power_of_2)


class _Float8Flat(Protocol):
    """A flat buffer of such weights."""

    shard: Tensor
    full: Tensor
    layout: FlatLayout
    shard_index: int


class Float8Codec(ShardCodec):
    """Rounds the shards of one buffer as its layers do.

    Attributes:
        flat: The buffer; set by `Float8Scales.add`.
    """

    flat: _Float8Flat

    def __init__(self, weights: Sequence[Float8Weight], scales: "Float8Scales") -> None:
        self._weights, self._scales = weights, scales
        self._found: list[_Tables] = []

    @override
    def form(self, numel: int) -> Sequence[Tensor]:
        return [torch.empty(numel, dtype=torch.uint8, device="meta")]

    @override
    def tables(self) -> list[_Tables]:
        self._scales.find()
        return self._found

    @override
    def forget(self) -> None:
        self._scales.forget()

    @property
    def num_scales(self) -> list[int]:
        """How many scales each parameter has."""
        slots = self.flat.layout.slots
        return [
            slot.shape[0] if one.by_rows else 1
            for one, slot in zip(self._weights, slots, strict=True)
        ]

    def greatest(self) -> list[Tensor]:
        """Return by parameter the greatest magnitudes of this rank's shard as it is gathered."""
        layout, counts, rounded = self.flat.layout, self.num_scales, self._rounded(self.flat.shard)
        found = [rounded.new_zeros(count) for count in counts]
        for index, part in _parts(layout, self.flat.shard_index):
            each = layout.slots[index].numel // counts[index]
            first, last = part.param_offset // each, -(-part.param_stop // each)
            own = rounded[part.shard_offset : part.shard_stop].abs()
            if last - first > 1:
                own = F.pad(own, (part.param_offset % each, -part.param_stop % each))
            found[index][first:last] = own.view(last - first, -1).amax(1)
        return found

    def take(self, greatest: Sequence[Tensor]) -> None:
        """Take the greatest magnitudes of all ranks' shards, by parameter."""
        self._found = [one.tables(own) for one, own in zip(self._weights, greatest, strict=True)]

    def _rounded(self, shard: Tensor) -> Tensor:
        return shard.to(self.flat.full.dtype).float()

    @override
    def encode(self, shard: Tensor, tables: Any) -> list[Tensor]:
        layout, rounded = self.flat.layout, self._rounded(shard)
        codes = torch.zeros_like(rounded, dtype=torch.uint8)
        for index, part in _parts(layout, self.flat.shard_index):
            own = slice(part.shard_offset, part.shard_stop)
            scales = _spread(tables[index].scales, layout.slots[index].numel, part)
            codes[own] = self._weights[index].codes(rounded[own] * scales).view(torch.uint8)
        return [codes]

    @override
    def decode(self, fields: Sequence[Tensor], rank: int, numel: int, tables: Any) -> Tensor:
        (codes,), layout = fields, self.flat.layout
        shard = torch.zeros_like(codes, dtype=torch.float32)
        for index, part in _parts(layout, rank):
            own = slice(part.shard_offset, part.shard_stop)
            values = codes[own].view(self._weights[index].dtype).float()
            greatest, scales, tops = (
                _spread(one, layout.slots[index].numel, part) for one in tables[index]
            )
            is_top = values.abs() == tops
            shard[own] = torch.where(is_top, values.sign() * greatest, values / scales)
        return shard


def _parts(layout: FlatLayout, rank: int) -> list[tuple[int, ShardSlice]]:
    """Return what a rank's shard has of parameters, by their index."""
    return [(one, part) for one, part in enumerate(layout.shard_slices(rank)) if part.numel]


def _spread(values: Tensor, numel: int, part: ShardSlice) -> Tensor:
    """Return one of a parameter's values for each of the elements of a part, or one for all."""
    each = numel // values.numel()
    own = values[part.param_offset // each : -(-part.param_stop // each)]
    if own.numel() == 1:
        return own
    first = part.param_offset % each
    return own.repeat_interleave(each)[first : first + part.numel]


class Float8Scales:
    """Finds the greatest magnitudes of a model's weights in float8, in one reduction.

    Args:
        weights: How each of them is rounded.
    """

    def __init__(self, weights: Mapping[nn.Parameter, Float8Weight]) -> None:
        self.weights = weights
        self._codecs: dict[Collectives, list[Float8Codec]] = {}
        self._are_known = False

    @classmethod
    def of(cls, model: nn.Module, gather_dtype: GatherDType | None) -> "Float8Scales":
        """Return those of a model whose weights travel so; of none without the option."""
        weights = {} if gather_dtype is None else float8_weights(model)
        if gather_dtype is not None and not weights:
            raise ConfigError(
                f"gather_dtype={gather_dtype!r} gathers weights of layers in float8, got a "
                f"{type(model).__name__} without any; expected torchao's, whose weights no other "
                f"layer uses. Call convert_to_float8_training in __init__, or leave it out."
            )
        return cls(weights)

    def codec(self, params: Sequence[nn.Parameter]) -> Float8Codec:
        """Return the codec of a buffer of such weights."""
        return Float8Codec([self.weights[param] for param in params], self)

    def add(self, codec: Float8Codec, flat: _Float8Flat, ranks: Collectives) -> None:
        """Let a buffer's be found with those of the others that lie on the same ranks."""
        codec.flat = flat
        self._codecs.setdefault(ranks, []).append(codec)

    def forget(self) -> None:
        """Note that shards may have changed; on each rank between the same unshards."""
        self._are_known = False

    @torch.no_grad()
    def find(self) -> None:
        """Find them unless they are known; collective."""
        if self._are_known:
            return
        self._are_known = True
        for ranks, codecs in self._codecs.items():
            found = [one for codec in codecs for one in codec.greatest()]
            joined = torch.cat(found)
            ranks.all_reduce(joined, "max").wait()
            parts = iter(torch.split(joined, [one.numel() for one in found]))
            for codec in codecs:
                codec.take([next(parts) for _ in codec.num_scales])
