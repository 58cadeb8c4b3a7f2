"""Saving of a failed run's state, while its callbacks hear of the error.

    all ranks have raised at the same place   they save together, as ever
    a signal has stopped all of them          so they do, and once if nobody asks: see below
    each rank has the full state              the first that is left saves it, and asks nobody
    other ranks have parts of the state       an error says why there is no file

A rank that has failed alone would wait in `trainer.save_checkpoint` for peers that are somewhere
else, or write its part of the state to a file that looks full.

When a signal ends a fit its state is saved once, for the job that goes on:

    SIGTERM            `last-sigterm.ckpt` beside the files of the first `ModelCheckpoint`, unless a
                       callback saves on the exception; `ckpt_path="last"` finds the newest
    SLURM's requeue    `hpc_ckpt_N.ckpt` in the trainer's default folder, before callbacks save
                       theirs; it gets its name when it is complete, since Lightning counts
                       everything that has `hpc_ckpt_` in its name. Then rank 0 has the job requeued
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_shard.checkpoint.files.places import local_path
from lightning_shard.core.states import setting
from lightning_shard.environments.launchers.failures import noted
from lightning_shard.strategies.trainer._lightning import requeue, requeue_path


def salvaging(
    run: Any, error: BaseException, *, is_common: bool, gone: Sequence[int]
) -> AbstractContextManager[None]:
    """Make the context in which callbacks hear of an exception and may save checkpoints."""
    if is_common and run.groups.present is not None:
        if run.has_shut_down_together:
            return _saving_after_signal(run, error)
        return _saving_together(run)
    if run.checkpoints.has_all:
        left = (rank for rank in range(run.strategy.mesh_size) if rank not in gone)
        return saving_alone(run, writes=run.strategy.mesh_rank == next(left, 0))
    return saving_nothing(
        run,
        f"the ranks have stopped at different places, this one with {type(error).__name__}, and "
        f"each has a part of the state only",
    )


@contextmanager
def _saving_after_signal(run: Any, error: BaseException) -> Iterator[None]:
    with _saving_together(run), saving_once(run, error):
        yield


def _saving_together(run: Any) -> AbstractContextManager[None]:
    steps = run.groups.all_ranks.all_gather_object(run.module.trainer.global_step)
    if len(set(steps)) == 1:
        return nullcontext()
    return saving_nothing(run, f"the ranks have raised after different numbers of steps, {steps}")


@contextmanager
def saving_alone(run: Any, *, writes: bool) -> Iterator[None]:
    """Let a rank that has the full state save it by itself, if it is the one that writes."""
    apart = nullcontext() if run.engine is None else run.engine.asking_nobody()
    with setting(run.checkpoints, writes_alone=writes), run.groups.asking_nobody(), apart:
        yield


def saving_nothing(run: Any, reason: str) -> AbstractContextManager[None]:
    """Raise an error inside when code asks for a state to save, which says why there is none."""
    return setting(run.checkpoints, refusal=reason)


@contextmanager
def saving_once(run: Any, error: BaseException) -> Iterator[None]:
    """Save a fit that a signal has ended, unless callbacks do so inside; each rank must call."""
    trainer, before = run.module.trainer, run.checkpoints.num_fits
    if run.termination.requeues:
        with noted(error, "having SLURM requeue the job"):
            _have_requeued(run.strategy, trainer)
    yield
    place, is_saved = _place(trainer), run.checkpoints.num_fits > before
    saves = run.termination.saves_on_sigterm and place
    if saves and run.strategy.reduce_boolean_decision(not is_saved):
        trainer.save_checkpoint(place)
        rank_zero_info(
            f"The run was sent SIGTERM after step {trainer.global_step}, and its state is saved in "
            f"{place}. Go on from it with trainer.fit(..., ckpt_path='last')."
        )


def _has_trained(trainer: "pl.Trainer") -> bool:
    """Whether there is something to go on from that was not there before."""
    is_fit = trainer.state.fn == TrainerFn.FITTING
    return is_fit and trainer.global_step > 0 and not trainer.fast_dev_run  # type: ignore[attr-defined]


def _place(trainer: "pl.Trainer") -> str:
    """Return where to save on SIGTERM; "" where nothing is to be saved."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath and _saves(callback):
            name = f"{callback.CHECKPOINT_NAME_LAST}-sigterm{callback.FILE_EXTENSION}"
            return os.path.join(callback.dirpath, name) if _has_trained(trainer) else ""
    return ""


def _saves(callback: ModelCheckpoint) -> bool:
    return callback.save_top_k != 0 or bool(callback.save_last)


def _have_requeued(strategy: Any, trainer: "pl.Trainer") -> None:
    path, save_checkpoint = strategy.broadcast(requeue_path(trainer)), trainer.save_checkpoint
    folder, name = os.path.split(path)
    is_remote = local_path(path) is None  # where it counts when all of it has arrived
    written = path if is_remote else os.path.join(folder, name.replace("hpc_ckpt_", "requeue-"))

    def save() -> None:
        if not _has_trained(trainer):
            return
        save_checkpoint(written)
        strategy.finish_save()
        strategy.checkpoint_io.teardown()  # of Lightning's asynchronous one: waits for it
        strategy.barrier()
        if strategy.is_global_zero and not is_remote:
            os.replace(written, path)
        strategy.barrier()

    requeue(trainer, save)
