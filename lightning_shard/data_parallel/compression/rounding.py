"""Codecs that round every value: to 16 bits, or to 8 with a scale for each block."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from lightning_shard.core.options import AtLeastOne, checked_options
from lightning_shard.data_parallel.compression.codec import Codec
from lightning_shard.data_parallel.compression.compressor import Turn

_FP16_EXPONENT = 15  # below that of fp16's greatest value, so that rounding cannot overflow
_LEAST_EXPONENT = -120  # so that one over the scale is a float32, too
_INT8_MAX = 127


def in_blocks(values: Tensor, block: int) -> Tensor:
    """Cut into rows of `block` values, zeros behind the last: shape (n,) to (blocks, block)."""
    return pad(values, (0, -values.numel() % block)).view(-1, block)


class FP16(Codec):
    """Half precision: 2x smaller, relative error 2**-11.

    Values travel divided by a power of two, chosen so that the greatest fits and the small ones
    do not vanish.
    """

    @override
    def encode(self, values: Tensor, turn: Turn) -> Sequence[Tensor]:
        least, greatest = values.aminmax()
        peak = torch.maximum(-least, greatest)
        exponent = (torch.frexp(peak).exponent - _FP16_EXPONENT).clamp_min(_LEAST_EXPONENT)
        scale = torch.ldexp(torch.ones_like(peak), exponent)
        return scale[None], (values * scale.reciprocal()).to(torch.float16)

    @override
    def decode(self, fields: Sequence[Tensor], numel: int) -> Tensor:
        scale, scaled = fields
        return scaled.float().mul_(scale)


class BF16(Codec):
    """Brain floating point: 2x smaller, relative error 2**-8, the range of float32."""

    @override
    def encode(self, values: Tensor, turn: Turn) -> Sequence[Tensor]:
        return (values.to(torch.bfloat16),)

    @override
    def decode(self, fields: Sequence[Tensor], numel: int) -> Tensor:
        return fields[0].float()


class Int8(Codec):
    """Eight bits and a scale for each block: 3.9x smaller, error below 1/127 of the block's peak.

    Args:
        block: Number of values that share a scale.
        rounding: "nearest", or "stochastic": up or down at random, right on average.
        seed: Seed of stochastic rounding, the same from run to run.
    """

    @checked_options
    def __init__(
        self,
        block: AtLeastOne = 256,
        rounding: Literal["nearest", "stochastic"] = "stochastic",
        seed: int = 0,
    ) -> None:
        self.block = block
        self.rounding = rounding
        self.seed = seed

    @override
    def encode(self, values: Tensor, turn: Turn) -> Sequence[Tensor]:
        blocks = in_blocks(values, self.block)
        scales = blocks.abs().amax(1, keepdim=True) / _INT8_MAX
        codes = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)
        if self.rounding == "nearest":
            codes.round_()
        else:
            random = torch.Generator(values.device).manual_seed(turn.seed + self.seed)
            codes.add_(torch.rand(codes.shape, generator=random, device=values.device)).floor_()
        codes = codes.clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8)
        return scales.view(-1), codes.view(-1)[: values.numel()].clone()

    @override
    def decode(self, fields: Sequence[Tensor], numel: int) -> Tensor:
        scales, codes = fields
        return (in_blocks(codes.float(), self.block) * scales[:, None]).view(-1)[:numel]
