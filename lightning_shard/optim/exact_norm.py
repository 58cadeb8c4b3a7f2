"""The 2-norm of a gradient that lies in shards, with bits that do not depend on how it is cut.

A sum of floats depends on its order, one of whole numbers does not. So each square is scaled by
the greatest element's power of two, and cut into two whole numbers:

    (g / 2^e)^2 = high / 2^30 + low / 2^60 + what is left out, at most 2^-60 of the greatest square
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives

_LEVEL = 2.0**30  # so many sums of 2^33 elements fit into 63 bits
_BLOCK_NUMEL = {"cpu": 1 << 17}  # stays in the cache; elsewhere fewer launches count for more
_LARGEST_BLOCK_NUMEL = 1 << 22  # whose whole numbers float64 adds up exactly


@torch.no_grad()
def exact_norm(
    grads: Sequence[Tensor], groups: Sequence[Collectives], device: torch.device
) -> Tensor:
    """Return the norm of all ranks' gradients together; each rank of the groups must call.

    Returns:
        Shape (), float64, the same bits however the elements are spread.
    """
    greatest = torch.zeros((), dtype=torch.float64, device=device)
    for grad in (one for one in grads if one.numel()):
        lowest, highest = torch.aminmax(grad)
        largest = torch.maximum(-lowest, highest).double()
        greatest = torch.maximum(greatest, largest.nan_to_num(nan=torch.inf))
    for group in groups:
        group.all_reduce(greatest, "max").wait()
    scale = torch.ldexp(torch.ones_like(greatest), -torch.frexp(greatest).exponent)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    block_numel = _BLOCK_NUMEL.get(device.type, _LARGEST_BLOCK_NUMEL)
    for block in (one for grad in grads for one in torch.split(grad.flatten(), block_numel)):
        squares = block.double().mul_(scale * _LEVEL**0.5).square_()
        high = squares.floor()
        low = squares.sub_(high).mul_(_LEVEL).floor_()
        sums += torch.stack([high.sum(), low.sum()]).long()
    for group in groups:
        group.all_reduce(sums, "sum").wait()
    high, low = sums.double().unbind()
    norm = ((high + low / _LEVEL) / _LEVEL).sqrt() / scale
    return torch.where(greatest.isfinite(), norm, greatest)
