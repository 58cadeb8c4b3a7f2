"""Tensors of many shapes as one flat buffer, for one exchange.

Narrow formats travel in float32: a step is often too small for them to represent.
"""

from collections.abc import Iterable, Sequence
from functools import reduce

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the format in which sums over ranks and steps are kept."""
    return torch.promote_types(dtype, torch.float32)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors into one new flat buffer of real numbers, at least float32."""
    flat = [_real(tensor).reshape(-1) for tensor in tensors]
    dtype = reduce(torch.promote_types, (part.dtype for part in flat), torch.float32)
    return torch.cat([part.to(dtype) for part in flat])


def unpack(buffer: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """Return the parts of a buffer in the shapes of `like`, as views where formats allow."""
    shapes = [(_real(tensor), tensor) for tensor in like]
    parts = torch.split(buffer, [real.numel() for real, _ in shapes])
    return [
        _as_complex(part.view(real.shape)) if tensor.is_complex() else part.view(real.shape)
        for part, (real, tensor) in zip(parts, shapes, strict=True)
    ]


def mean_over_ranks(tensors: Sequence[Tensor], collectives: Collectives) -> list[Tensor]:
    """Average tensors over the ranks; each rank must call with the same shapes."""
    if not tensors:
        return []
    buffer = pack(tensors)
    collectives.all_reduce(buffer, "avg").wait()
    return unpack(buffer, tensors)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _as_complex(part: Tensor) -> Tensor:
    return torch.view_as_complex(part.clone())  # a view has to begin at an even place
