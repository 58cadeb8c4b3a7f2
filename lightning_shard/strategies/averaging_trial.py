"""Does a function average every element by itself? It is tried on a matrix and on its pieces."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_SHAPE = (4, 6)
_CUT = 10  # inside a row

Averaged = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]


def why_not_elementwise(averaged: Averaged) -> str | None:
    """Return what the trial has shown; None when pieces come out as the matrix does.

    Args:
        averaged: Given averages and current values, returns new averages.
    """
    generator = torch.Generator().manual_seed(0)
    average, current = torch.randn((2, *_SHAPE), generator=generator).unbind()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            (whole,) = averaged([average], [current])
            pieces = averaged(_in_pieces(average), _in_pieces(current))
    except Exception as error:  # whatever a foreign function raises, it says why
        return f"a trial raised {type(error).__name__}: {error}"
    if torch.allclose(whole.flatten(), torch.cat(pieces), rtol=1e-5, atol=1e-7):
        return None
    return "in a trial, pieces of a matrix came out differently from the matrix"


def _in_pieces(matrix: Tensor) -> list[Tensor]:
    """Cut a matrix into 1-D pieces, of which one has no elements."""
    flat = matrix.flatten()
    return [flat[:0], flat[:_CUT], flat[_CUT:]]
