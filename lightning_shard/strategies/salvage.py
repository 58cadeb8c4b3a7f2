"""Saving of a failed run's state, while its callbacks hear of the error.

    all ranks have raised at the same place   they save together, as ever
    a signal has stopped all of them          so they do, and once if nobody asks: see `preemption`
    each rank has the full state             the first that is left saves it, and asks nobody
    other ranks have parts of the state       an error says why there is no file

Callbacks such as `OnExceptionCheckpoint` call `trainer.save_checkpoint`, which asks all ranks. A
rank that has failed alone would wait for peers that are somewhere else, or write its part of the
state to a file that looks full.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn
from unittest.mock import patch

from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.errors import CheckpointError
from lightning_shard.strategies.preemption import saving_once


def salvaging(
    strategy: Any, error: BaseException, *, is_common: bool, gone: Sequence[int], has_all: bool
) -> AbstractContextManager[None]:
    """Make the context in which callbacks hear of an exception and may save checkpoints.

    Args:
        strategy: The strategy of this rank.
        error: Exception that this rank has raised.
        is_common: Whether all ranks have raised at the same place, and enter this, too.
        gone: Ranks that have died.
        has_all: Whether this rank alone has the full state, to save it without asking the others.
    """
    if is_common and strategy.present_collectives is not None:
        if strategy.has_shut_down_together:
            return _saving_after_signal(strategy, error)
        return _saving_together(strategy)
    if has_all:
        left = (rank for rank in range(strategy.mesh_size) if rank not in gone)
        writes = strategy.mesh_rank == next(left, 0)
        return saving_alone(strategy, strategy.present_engine, writes=writes)
    return saving_nothing(
        strategy,
        f"the ranks have stopped at different places, this one with {type(error).__name__}, and "
        f"each has a part of the state only",
    )


@contextmanager
def _saving_after_signal(strategy: Any, error: BaseException) -> Iterator[None]:
    with _saving_together(strategy), saving_once(strategy, error):
        yield


def _saving_together(strategy: Any) -> AbstractContextManager[None]:
    steps = strategy.collectives.all_gather_object(strategy.lightning_module.trainer.global_step)
    if len(set(steps)) == 1:
        return nullcontext()
    return saving_nothing(
        strategy, f"the ranks have raised after different numbers of steps, {steps}"
    )


class Sole:
    """Stands for the collectives of a rank that asks nobody, while it saves what it has."""

    rank = 0
    size = 1

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return this rank's own."""
        return [obj]


@contextmanager
def saving_alone(
    strategy: Any, engine: DataParallelEngine | None, *, writes: bool
) -> Iterator[None]:
    """Let a rank that has the full state save it by itself, if it is the one that writes.

    Args:
        strategy: The strategy of this rank.
        engine: The strategy's engine; None where there is none any more.
        writes: Whether this rank writes the file.
    """

    def save_checkpoint(checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        if writes:
            strategy.write_alone(checkpoint, filepath, storage_options)

    sole: Any = Sole()
    with ExitStack() as stack:
        stack.enter_context(patch.object(strategy, "_collectives", None))
        stack.enter_context(patch.object(strategy, "save_checkpoint", save_checkpoint))
        if engine is not None:
            stack.enter_context(patch.object(engine, "collectives", sole))
            stack.enter_context(patch.object(engine, "groups", DataGroups.of(sole)))
        yield


@contextmanager
def saving_nothing(strategy: Any, reason: str) -> Iterator[None]:
    """Raise an error inside when code asks for a state to save, which says why there is none.

    Args:
        strategy: The strategy of this rank.
        reason: Why nothing is saved, as a clause for the error.
    """

    def refuse(*_: Any) -> NoReturn:
        raise CheckpointError(
            f"Rank {strategy.mesh_rank}: nothing is saved on this exception, since {reason}. Go "
            f"on from the last checkpoint; one that is saved every few hundred steps "
            f"(ModelCheckpoint(every_n_train_steps=...)) costs little."
        )

    with patch.object(strategy, "lightning_module_state_dict", refuse):
        yield
