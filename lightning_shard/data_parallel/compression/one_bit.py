"""One bit for each value, its sign, and one scale for each block (1-bit Adam, arXiv:2102.02888)."""

from collections.abc import Sequence
from math import inf
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import embedding
from typing_extensions import override

from lightning_shard.core.options import AtLeastZero, Limit, checked_options
from lightning_shard.data_parallel.compression.codec import Codec
from lightning_shard.data_parallel.compression.compressor import Turn
from lightning_shard.data_parallel.compression.rounding import in_blocks
from lightning_shard.errors import ConfigError

_BITS = 8
# Eight bytes of 0 or 1, seen as one integer and multiplied by this, have bit i of byte 7 from byte
# i; no two products of their bits meet, so nothing is carried.
_GATHER = sum(1 << (56 - 7 * place) for place in range(_BITS))
_LEAST_BLOCK = 1024  # 31x smaller with a scale of 4 bytes
_BLOCK = Limit(
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
        block: Annotated[int, _BLOCK] = 2048,
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
