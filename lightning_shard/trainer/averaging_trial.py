"""A trial of whether a function averages every element by itself, on a matrix and its shards."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_shard.optim.elementwise import why_different

_SHAPE = (4, 6)
_CUT = 10  # inside a row

Averaged = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]


def why_not_elementwise(averaged: Averaged) -> str | None:
    """Return in words how shards come out differently than the matrix; None when they do not.

    Args:
        averaged: Returns new averages for given averages and current values.
    """
    generator = torch.Generator().manual_seed(0)
    average, current = torch.randn((2, *_SHAPE), generator=generator).unbind()

    def results() -> list[list[Tensor]]:
        shards = averaged(_in_shards(average), _in_shards(current))
        return [averaged([average], [current]), shards]

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return why_different(results)


def _in_shards(matrix: Tensor) -> list[Tensor]:
    """Cut a matrix into 1-D shards, of which one has no elements."""
    flat = matrix.flatten()
    return [flat[:0], flat[:_CUT], flat[_CUT:]]
