"""Calls loggers once per event, whatever the number of ranks.

Lightning calls the loggers of every rank, and expects their methods to be decorated with
`rank_zero_only`. A logger that was written for one device is not: it would log once for each rank.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_only

_TOLD = (
    "after_save_checkpoint",
    "finalize",
    "log_graph",
    "log_hyperparams",
    "log_metrics",
    "save",
)


@contextmanager
def told_once(trainer: "pl.Trainer | None") -> Iterator[None]:
    """Let the methods of a trainer's loggers do nothing inside on ranks other than 0.

    Ranks of this process share the loggers: call around all of them.
    """
    with ExitStack() as stack:
        for logger in [] if trainer is None else trainer.loggers:
            for name in [one for one in _TOLD if hasattr(logger, one)]:
                stack.enter_context(_on_rank_zero(logger, name))
        yield


@contextmanager
def _on_rank_zero(logger: Any, name: str) -> Iterator[None]:
    is_own = not hasattr(type(logger), name)
    method = getattr(logger, name)
    setattr(logger, name, rank_zero_only(method))
    try:
        yield
    finally:
        if is_own:  # a mock's, for example
            setattr(logger, name, method)
        else:
            delattr(logger, name)
