"""Properties of tensors as functions that are written in C, to `map` over the tensors of a buffer.

A loop of Python costs three times as much. Parameters that may be in shards are `as_they_are`.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

_TENSOR: Any = Tensor  # whose properties are descriptors, which type checkers do not know
OWN_GRAD: Callable[[Tensor], Tensor | None] = _TENSOR.grad.__get__
SET_OWN_GRAD: Callable[[Tensor, Tensor | None], None] = _TENSOR.grad.__set__
REQUIRES_GRAD: Callable[[Tensor], bool] = _TENSOR.requires_grad.__get__
IS_SPARSE: Callable[[Tensor], bool] = _TENSOR.is_sparse.__get__
VERSION: Callable[[Tensor], int] = _TENSOR._version.__get__
_P = ParamSpec("_P")
_R = TypeVar("_R")


def unrecorded(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let autograd record nothing of what a function does.

    torch's own decorator makes a context at every call; where nothing is recorded, this asks only.
    """

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return called


def addresses_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return where the memory of each tensor begins."""
    return [*map(Tensor.data_ptr, tensors)]


def num_trained(params: Iterable[Tensor]) -> int:
    """Return how many parameters require a gradient."""
    return sum(map(REQUIRES_GRAD, params))
