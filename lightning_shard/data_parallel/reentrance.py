"""Checkpoints of activations that are not reentrant, where gradients go to some leaves only.

A reentrant checkpoint runs a backward of its own within the backward, which torch allows only where
gradients go to every leaf; a stage of a pipeline, or a trial of a block, asks for those of some. So
there `torch.utils.checkpoint` keeps its checkpoints in the other way, which computes the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch.utils import checkpoint

_is_off: ContextVar[bool] = ContextVar("is_off", default=False)
_Reentrant: Any = checkpoint.CheckpointFunction


class _CheckpointFunction(_Reentrant):  # type: ignore[misc]
    """The function that `checkpoint` calls where it is to be reentrant."""

    @classmethod
    def apply(cls, function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        """Make a checkpoint that is not reentrant where none may be, else torch's own."""
        if not _is_off.get():
            return _Reentrant.apply(function, preserve_rng_state, *args)
        return checkpoint.checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


@contextmanager
def without_reentrance() -> Iterator[None]:
    """Make no checkpoint of activations reentrant inside, whatever the user's code asks for."""
    checkpoint.CheckpointFunction = _CheckpointFunction  # type: ignore[misc]
    token = _is_off.set(True)
    try:
        yield
    finally:
        _is_off.reset(token)
