"""Tensors that are the same but for rounding, which is a share of the largest of their elements."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def largest(tensors: Iterable[Tensor]) -> float:
    """Return the largest absolute element that is finite; 0 where there is none."""
    found = (one[one.isfinite()].abs() for one in map(_wide, tensors))
    return max((float(one.max()) for one in found if one.numel()), default=0.0)


def apart(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors.

    It is infinite where shapes differ, or an element is finite in one of them alone.
    """
    if got.shape != expected.shape:
        return math.inf
    got, expected = _wide(got), _wide(expected)
    same = (got == expected) | (got.isnan() & expected.isnan())
    between = torch.where(same, 0.0, got - expected).abs().nan_to_num(math.inf)
    return float(between.max()) if between.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in a format in which differences lose nothing that counts."""
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize >= 4):
        return tensor.detach()
    return tensor.detach().to(torch.float32 if tensor.is_floating_point() else torch.float64)


def is_close(got: Tensor, expected: Tensor, relative: float, least: float = 0.0) -> bool:
    """Whether tensors differ by no more than a share of the largest element, and `least`."""
    return apart(got, expected) <= relative * largest([expected]) + least
