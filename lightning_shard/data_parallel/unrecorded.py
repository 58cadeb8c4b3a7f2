"""`torch.no_grad` for functions of the engine, which call each other and mostly run in backward.

torch's own decorator makes, enters and leaves a context at every call: some microseconds. Where
autograd records nothing already, this one only asks.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def unrecorded(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let autograd record nothing of what a function does."""

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return called
