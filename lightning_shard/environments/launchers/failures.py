"""Tells callbacks that a rank's function has raised, while the ranks' groups still stand.

    the function raises ─> ranks meet: have all raised alike? ─> on_exception of callbacks ─> the
    caller, through Lightning, which would have called these hooks only now

Where all ranks have raised at the same place, they can still save together. Whatever a callback
raises meanwhile becomes a note on the error, and is logged.
"""

import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_shard.backends import liveness
from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.in_process.world import ElasticWorld, current_world
from lightning_shard.environments.launchers._lightning import mark_interrupted

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """The circumstances in which a rank's function has raised.

    Attributes:
        heard: The error that callbacks are told.
        is_common: Whether all ranks have raised at the same place, so that their groups work still.
    """

    heard: BaseException
    is_common: bool = False
    gone: Sequence[int] = ()


class Salvages(Protocol):
    """The run of a strategy, which knows what can be saved of it when it has failed."""

    def salvaging(
        self, error: BaseException, *, is_common: bool, gone: Sequence[int]
    ) -> AbstractContextManager[None]:
        """Make the context in which callbacks hear of an exception and may save checkpoints."""

    def end_in_common(self) -> None:
        """Tear the run down after an exception that all ranks have raised at the same place."""

    @property
    def has_shut_down_together(self) -> bool:
        """Whether all ranks have stopped at the same place of the run, by agreement."""


@runtime_checkable
class Salvaged(Protocol):
    """A strategy of this package's."""

    run: Salvages


def tell(trainer: "pl.Trainer", found: Circumstances) -> None:
    """Tell callbacks of an error, so that they can save; if it is common, each rank must call."""
    error = found.heard
    mark_interrupted(trainer)
    is_main = threading.current_thread() is threading.main_thread()
    if isinstance(error, KeyboardInterrupt) and is_main:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as Lightning, which puts it back
    strategy = trainer.strategy
    with noted(error, "saving what there is"):
        if not isinstance(strategy, Salvaged):  # Lightning's own
            _tell_each(trainer, error)
            return
        with strategy.run.salvaging(error, is_common=found.is_common, gone=found.gone):
            _tell_each(trainer, error)
        if found.is_common:
            strategy.run.end_in_common()


def _tell_each(trainer: "pl.Trainer", error: BaseException) -> None:
    owner: Any = trainer
    for callback in owner.callbacks:
        with noted(error, f"{type(callback).__name__}.on_exception"):
            callback.on_exception(trainer, trainer.lightning_module, error)
    if owner.datamodule is not None:
        with noted(error, f"{type(owner.datamodule).__name__}.on_exception"):
            owner.datamodule.on_exception(error)


@contextmanager
def noted(error: BaseException, doing: str) -> Iterator[None]:
    """Turn an error that is raised inside into a note on `error`, which came before it."""
    try:
        yield
    except Exception as another:
        text = f"{type(another).__name__}: {another}"
        if any(text in note for note in getattr(error, "__notes__", ())):
            return  # the next callback that cannot save for the same reason
        error.add_note(f"In {doing}, after this error: {text}")
        _log.warning("After %s, in %s: %s", type(error).__name__, doing, text)


_BETWEEN_TWO = ("send", "recv")  # of which neighbours in a pipeline make different numbers


def all_raise(error: BaseException) -> bool:
    """Tell the other ranks that this one has raised; return whether all have, after the same calls.

    In process the others go on if not, and find out when they need this rank.
    """
    world = current_world()
    if isinstance(world, ElasticWorld):
        return world.all_raise(error)
    lifeline = liveness.current()
    if lifeline is None:
        return dist.is_initialized() and dist.get_world_size() == 1
    calls = sum(
        traffic.calls
        for group in Collectives.traffic_by_group()
        for operation, traffic in group.traffic.items()
        if operation not in _BETWEEN_TWO
    )
    return lifeline.fail(error, calls)
