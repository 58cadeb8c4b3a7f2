"""Only the greatest values travel; the rest waits until it has grown.

    values   bfloat16   what rounding loses waits, too
    places   int16      within blocks of 65,536 values, in rising order
    counts   int32      how many are in each block

Each rank has other greatest values. Their sum has up to N times as many, of which the owner sends
on up to three times as many: where fewer passed, most would wait twice.
Source: Deep Gradient Compression, arXiv:1712.01887.
"""

from collections.abc import Sequence
from math import ceil
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.core.options import AtLeastZero, Limit, checked_options
from lightning_shard.data_parallel.compression.codec import Codec
from lightning_shard.data_parallel.compression.compressor import Turn
from lightning_shard.errors import ConfigError

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
