"""The codecs that have names: values in 16 bits, 8 or 4, as signs, or only the greatest of them.

TopK   values   bfloat16   what rounding loses waits, too
       places   int16      within blocks of 65,536 values, in rising order
       counts   int32      how many are in each block

Each rank has other greatest values. Their sum has up to N times as many, of which the owner sends
on up to three times as many: where fewer passed, most would wait twice.
Source: Deep Gradient Compression, arXiv:1712.01887; 1-bit Adam, arXiv:2102.02888.
"""

from collections.abc import Sequence
from math import ceil, inf
from typing import Annotated, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad
from typing_extensions import override

from lightning_shard.core.options import AtLeastOne, AtLeastZero, Limit, checked_options
from lightning_shard.data_parallel.compression.codec import Codec
from lightning_shard.data_parallel.compression.compressor import Turn
from lightning_shard.errors import ConfigError

_FP16_EXPONENT = 15  # below that of fp16's greatest value, so that rounding cannot overflow
_LEAST_EXPONENT = -120  # so that one over the scale is a float32, too
Rounding: TypeAlias = Literal["nearest", "stochastic"]


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


class _Rounded(Codec):
    """Whole numbers from -`greatest` to it, and a scale for each block; see `Int8`."""

    greatest: ClassVar[int]

    def __init__(self, block: int, rounding: Rounding, seed: int) -> None:
        self.block, self.rounding, self.seed = block, rounding, seed

    @override
    def encode(self, values: Tensor, turn: Turn) -> Sequence[Tensor]:
        blocks = in_blocks(values, self.block)
        scales = blocks.abs().amax(1, keepdim=True) / self.greatest
        codes = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)
        if self.rounding == "nearest":
            codes.round_()
        else:
            random = torch.Generator(values.device).manual_seed(turn.seed + self.seed)
            codes.add_(torch.rand(codes.shape, generator=random, device=values.device)).floor_()
        codes = codes.clamp_(-self.greatest, self.greatest).to(torch.int8)
        return scales.view(-1), self.packed(codes.view(-1)[: values.numel()])

    @override
    def decode(self, fields: Sequence[Tensor], numel: int) -> Tensor:
        scales, packed = fields
        codes = self.unpacked(packed)[:numel]
        return (in_blocks(codes.float(), self.block) * scales[:, None]).view(-1)[:numel]

    def packed(self, codes: Tensor) -> Tensor:
        """Return what travels of whole numbers, shape (n,) of int8."""
        return codes.clone()

    def unpacked(self, packed: Tensor) -> Tensor:
        """Return the whole numbers, and perhaps more behind them."""
        return packed


class Int8(_Rounded):
    """Eight bits and a scale for each block: 3.9x smaller, error below 1/127 of the block's peak.

    Args:
        block: Number of values that share a scale.
        rounding: "nearest", or "stochastic": up or down at random, right on average.
        seed: Seed of stochastic rounding, the same from run to run.
    """

    greatest = 127

    @checked_options
    def __init__(
        self, block: AtLeastOne = 256, rounding: Rounding = "stochastic", seed: int = 0
    ) -> None:
        super().__init__(block, rounding, seed)


class Int4(_Rounded):
    """Four bits and a scale for each block: 7.5x smaller, error below 1/7 of the block's peak.

    Args:
        block: Number of values that share a scale.
        rounding: "nearest", or "stochastic": up or down at random, right on average.
        seed: Seed of stochastic rounding, the same from run to run.
    """

    greatest = 7

    @checked_options
    def __init__(
        self, block: AtLeastOne = 128, rounding: Rounding = "stochastic", seed: int = 0
    ) -> None:
        super().__init__(block, rounding, seed)

    @override
    def packed(self, codes: Tensor) -> Tensor:
        low, high = in_blocks(codes, 2).view(torch.uint8).T & 15
        pairs: Tensor = low | (high << 4)
        return pairs

    @override
    def unpacked(self, packed: Tensor) -> Tensor:
        pairs = torch.stack((packed << 4, packed & 240), -1)  # the sign is the highest bit of both
        return pairs.view(torch.int8).view(-1) >> 4


_BITS = 8
# Eight bytes of 0 or 1, seen as one integer and multiplied by this, have bit i of byte 7 from byte
# i; no two products of their bits meet, so nothing is carried.
_GATHER = sum(1 << (56 - 7 * place) for place in range(_BITS))
_LEAST_BLOCK = 1024  # 31x smaller with a scale of 4 bytes
_EVEN_BLOCK = Limit(
    f"that is a multiple of {_BITS} and at least {_LEAST_BLOCK}",
    lambda block: block >= _LEAST_BLOCK and block % _BITS == 0,
)


class OneBit(Codec):
    """Signs and the mean magnitude of each block: 31x smaller after a dense warm-up.

    With `update_limit=None` it is the paper's algorithm 1 under "shard_ddp": after the warm-up all
    ranks go on from one momentum, m = b m + (1 - b) g of each rank and the average of these are
    encoded with what was lost before, the decoded average is everybody's m, and parameters change
    by lr m / (sqrt(v) + eps) with v as the warm-up has left it. Otherwise than in the paper,

    - an update is limited to `update_limit` learning rates: one scale for many signs is far too
      much for a value whose gradients are small;
    - where v is zero, no gradient has ever come, and nothing is changed: signs have no zero;
    - v is divided by 1 - b2^t, as torch's Adam divides it in the warm-up;
    - under "zero1" and "zero2" the owner of a shard gets the average as it is, without a second
      encoding, and each rank goes on from its own m, since the average is at the owner.

    Args:
        warmup_steps: Number of dense steps; Adam's second moment should be steady by then.
        block: Number of values that share a scale; a multiple of 8, at least 1024.
        adam: The rule of 1-bit Adam: after the warm-up it is the momentum that travels, and Adam's
            second moment is frozen. Needs torch's Adam or AdamW. False: gradients travel, for any
            optimizer.
        update_limit: The greatest change of a value in a step after the warm-up, in learning
            rates; None for no limit.
    """

    error_feedback = True

    @checked_options
    def __init__(
        self,
        warmup_steps: AtLeastZero = 100,
        block: Annotated[int, _EVEN_BLOCK] = 2048,
        adam: bool = True,
        update_limit: Annotated[float, Limit("above 0", lambda one: one > 0)] | None = 1.0,
    ) -> None:
        if adam and not warmup_steps:
            raise ConfigError(
                "OneBit(adam=True) needs a warm-up, in which Adam learns its second moment, got "
                "warmup_steps=0. A tenth of all steps is usual; or pass adam=False."
            )
        self.update_limit = inf if update_limit is None else update_limit
        self.warmup_steps = warmup_steps
        self.block = block
        self.sends_momentum = adam

    @override
    def is_dense(self, step: int) -> bool:
        return step < self.warmup_steps

    @override
    def encode(self, values: Tensor, turn: Turn) -> Sequence[Tensor]:
        blocks = in_blocks(values, self.block)
        scales = blocks.abs().sum(1) / self.block
        scales[-1] *= self.block / (values.numel() - (len(blocks) - 1) * self.block)
        return scales, pack_bits(values >= 0)

    @override
    def decode(self, fields: Sequence[Tensor], numel: int) -> Tensor:
        scales, packed = fields
        signs = in_blocks(unpack_signs(packed, numel), self.block)
        return signs.mul_(scales[:, None]).view(-1)[:numel]


def pack_bits(bits: Tensor) -> Tensor:
    """Pack bool of shape (n,) into uint8 of shape (ceil(n / 8),), the first bit lowest."""
    eights = in_blocks(bits.view(torch.uint8), _BITS).view(torch.int64).view(-1)
    return (((eights * _GATHER) >> 56) & 0xFF).to(torch.uint8)


def unpack_signs(packed: Tensor, numel: int) -> Tensor:
    """Return the first `numel` bits that `pack_bits` packed, as 1.0 and -1.0."""
    bytes_, places = torch.arange(256, device=packed.device), torch.arange(8, device=packed.device)
    signs = ((bytes_[:, None] >> places) & 1).mul_(2).sub_(1).float()  # (256, 8)
    return embedding(packed.int(), signs).view(-1)[:numel]


_MANY = 1 << 15  # values from which on a sample pays
_BLOCK = 1 << 16  # places that 16 bits tell apart
_MOST_SUMMED = 3
_GREATEST = torch.finfo(torch.bfloat16).max
_WARMUP_STAGES = 4  # 25 %, 6.25 %, 1.6 %, 0.4 %


class TopK(Codec):
    """The share `ratio` of values that are greatest in each segment, as values and positions.

    Trainer(gradient_clip_val=...) clips each rank's gradients before they are sent.

    Args:
        ratio: Share of its values that a rank sends, and of their average up to thrice that; 0.01
            makes messages 50x smaller, those of zero1 and zero2 100x.
        momentum: Momentum correction: what is sent is the momentum that SGD would have; give SGD
            itself none. Where a value is sent its momentum starts anew.
        warmup_steps: Over so many steps the share falls from 25 % in stages by 4; with `adam` they
            are dense.
        adam: For torch's Adam and AdamW. A value that comes once in a hundred steps, a hundred
            times as great, is a spike that Adam divides by itself. So as in 1-bit Adam
            (arXiv:2102.02888) the second moment is frozen after the warm-up, and the momentum
            travels, with DGC's masking.
    """

    error_feedback = True
    is_sparse = True

    @checked_options
    def __init__(
        self,
        ratio: Annotated[float, Limit("above 0 and at most 1", lambda one: 0 < one <= 1)] = 0.01,
        momentum: Annotated[float, Limit("from 0 to below 1", lambda one: 0 <= one < 1)] = 0.0,
        warmup_steps: AtLeastZero = 0,
        adam: bool = False,
    ) -> None:
        if adam and (momentum or not warmup_steps):
            raise ConfigError(
                f"TopK(adam=True) needs a warm-up, in which Adam learns its second moment, and no "
                f"momentum but Adam's, got warmup_steps={warmup_steps!r}, momentum={momentum!r}. "
                f"A tenth of all steps is usual."
            )
        self.sends_momentum = adam
        self.update_limit = 1.0 / ratio  # what a value may have gathered until it is sent
        self.ratio = ratio
        self.momentum = momentum
        self.warmup_steps = warmup_steps

    def ratio_at(self, step: int) -> float:
        """Return the share of values that is sent in a step."""
        if step >= self.warmup_steps:
            return self.ratio
        stage = step * _WARMUP_STAGES // self.warmup_steps
        return max(self.ratio, 0.25 ** (1 + stage))

    @override
    def is_dense(self, step: int) -> bool:
        return self.sends_momentum and step < self.warmup_steps

    @override
    def encode(self, values: Tensor, turn: Turn) -> Sequence[Tensor]:
        ratio = self.ratio_at(turn.step) * min(turn.num_summed, _MOST_SUMMED)
        count = min(values.numel(), ceil(ratio * values.numel()))
        places = greatest(values.abs(), count).sort().values
        counts = _counted(places, values.numel())
        chosen = values[places].clamp(-_GREATEST, _GREATEST).bfloat16()
        return counts.int(), (places % _BLOCK - _BLOCK // 2).short(), chosen

    @override
    def decode(self, fields: Sequence[Tensor], numel: int) -> Tensor:
        counts, within, chosen = fields
        blocks = torch.arange(counts.numel(), device=counts.device)
        starts = blocks.repeat_interleave(counts, output_size=within.numel()) * _BLOCK
        places = starts + within.long() + _BLOCK // 2
        return chosen.new_zeros(numel, dtype=torch.float32).index_copy_(0, places, chosen.float())


def _counted(places: Tensor, numel: int) -> Tensor:
    """Return how many of some places, which rise, lie in each block; a GPU is not waited for."""
    begins = torch.arange(0, numel + _BLOCK, _BLOCK, device=places.device)
    return torch.searchsorted(places, begins).diff()


def greatest(sizes: Tensor, count: int) -> Tensor:
    """Return indices of the `count` greatest values in any order; only a sample is sorted."""
    if sizes.device.type == "cpu" and sizes.numel() > _MANY and count < sizes.numel() // 8:
        sample = sizes[:: sizes.numel() // (_MANY // 4)]
        rank = min(sample.numel(), 2 + 2 * count * sample.numel() // sizes.numel())
        places = (sizes >= sample.topk(rank).values[-1]).nonzero().view(-1)
        if count <= places.numel() < sizes.numel() // 2:
            return places[sizes[places].topk(count, sorted=False).indices]
    return sizes.topk(count, sorted=False).indices
