"""Checkpoints of activations that are not reentrant, where gradients go to some leaves only.

A reentrant checkpoint runs a backward of its own within the backward, which torch allows only where
gradients go to every leaf; a stage of a pipeline, or a trial of a block, asks for those of some. So
there `torch.utils.checkpoint` keeps its checkpoints in the other way, and what is trained is the
same: nothing, where no tensor among a reentrant checkpoint's arguments asks for a gradient, and
nothing through tensors inside a list or a dictionary that it returns.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils import checkpoint

Asks = Callable[[Tensor], bool]
"""Says whether an argument of a checkpoint asks for a gradient."""

_asks: ContextVar[Asks | None] = ContextVar("asks", default=None)  # where none is reentrant
_Reentrant: Any = checkpoint.CheckpointFunction


class _CheckpointFunction(_Reentrant):  # type: ignore[misc]
    """The function that `checkpoint` calls where it is to be reentrant."""

    @classmethod
    def apply(cls, function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        """Make a checkpoint that is not reentrant where none may be, else torch's own."""
        asks = _asks.get()
        if asks is None:
            return _Reentrant.apply(function, preserve_rng_state, *args)
        if not any(asks(one) for one in args if isinstance(one, Tensor)):
            if torch.is_grad_enabled():
                checkpoint.check_backward_validity(args)  # which warns
            with torch.no_grad():
                return function(*args)
        result = checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )
        return tuple(map(_followed, result)) if isinstance(result, tuple) else _followed(result)


def _followed(result: Any) -> Any:
    """Return a result, or one of a tuple, without the graphs that a reentrant checkpoint drops."""
    is_tensor = isinstance(result, Tensor)
    return result if is_tensor else apply_to_collection(result, Tensor, Tensor.detach)


def requires_grad(tensor: Tensor) -> bool:
    """Say whether a tensor asks for a gradient where all tensors are known."""
    return tensor.requires_grad


@contextmanager
def without_reentrance(asks: Asks = requires_grad) -> Iterator[None]:
    """Make no checkpoint of activations reentrant inside, whatever the user's code asks for.

    Args:
        asks: Says whether an argument of a checkpoint asks for a gradient.
    """
    checkpoint.CheckpointFunction = _CheckpointFunction  # type: ignore[misc]
    token = _asks.set(asks)
    try:
        yield
    finally:
        _asks.reset(token)
