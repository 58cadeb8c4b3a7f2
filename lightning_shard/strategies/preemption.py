"""What is saved when a signal ends a fit: once, for the job that goes on.

    SIGTERM            `last-sigterm.ckpt` beside the files of the first `ModelCheckpoint`, unless a
                       callback saves on the exception; `ckpt_path="last"` finds the newest
    SLURM's requeue    `hpc_ckpt_N.ckpt` in the trainer's default folder, where Lightning looks for
                       it in the job's next life; then rank 0 has the job requeued

All ranks have stopped before the same batch. Callbacks that save on an exception, each to its own
file, do so as ever. The checkpoint for SLURM comes before them. It gets its name when it is
complete: Lightning counts everything that has `hpc_ckpt_` in its name, leftovers too.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_shard.checkpoint.files.places import local_path
from lightning_shard.launchers.failures import noted
from lightning_shard.trainer._lightning import requeue, requeue_path


@contextmanager
def saving_once(strategy: Any, error: BaseException) -> Iterator[None]:
    """Save a fit that a signal has ended, unless callbacks do so inside; each rank must call.

    Args:
        strategy: The strategy of the run, whose ranks have stopped together.
        error: What the callbacks hear of; it notes what could not be saved for SLURM.
    """
    trainer = strategy.lightning_module.trainer
    saved: list[Any] = []
    save_checkpoint = strategy.save_checkpoint

    def noting(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        save_checkpoint(checkpoint, filepath, storage_options)
        if "optimizer_states" in checkpoint:
            saved.append(filepath)

    with patch.object(strategy, "save_checkpoint", noting):
        if strategy.requeues:
            with noted(error, "having SLURM requeue the job"):
                _have_requeued(strategy, trainer)
        yield
    place = _place(trainer)
    if strategy.saves_on_sigterm and place and strategy.reduce_boolean_decision(not saved):
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
