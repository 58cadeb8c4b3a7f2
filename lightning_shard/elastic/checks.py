"""What elastic training does not do, said before it starts."""

from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
)
from torch.optim import LBFGS

from lightning_shard.errors import ConfigError


def check_backend(backend: str) -> None:
    """Refuse a backend whose ranks cannot outlive each other.

    Raises:
        ConfigError: The backend is MPI, whose launchers end all ranks with one; or shared memory,
            which has not been tried with ranks that come and go.
    """
    if backend == "shm":
        raise ConfigError(
            "The backend 'shm' cannot be elastic: its ranks share one host, and it has not been "
            "proved with ranks that come and go. Use backend='gloo'."
        )
    if backend == "mpi":
        raise ConfigError(
            "The backend 'mpi' cannot be elastic: when a rank dies, its launchers end the others. "
            "Use backend='gloo' or 'nccl', started by the Trainer, srun --no-kill or torchrun."
        )


def check_trainer(trainer: "pl.Trainer", averaging: Sequence[Callback]) -> None:
    """Check what is to be trained, and how.

    Args:
        trainer: The Trainer, whose optimizers are made.
        averaging: Those of its callbacks that average weights.

    Raises:
        ConfigError: It cannot be trained elastically.
    """
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise ConfigError(
            f"{type(module).__name__} optimizes manually, but elastic training changes over how "
            f"many batches gradients are accumulated when ranks come or go. Set "
            f"automatic_optimization=True, or use another strategy."
        )
    if averaging:
        names = ", ".join(type(one).__name__ for one in averaging)
        raise ConfigError(
            f"The callback {names} keeps averages that are lost with a "
            f"rank; expected none in elastic training. Average afterwards, over checkpoints."
        )
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, LBFGS):
            raise ConfigError(
                "LBFGS changes the weights several times in a step, so that after a loss it is not "
                "known where it was; expected one update in a step. Use another optimizer, or "
                "strategy='shard_ddp'."
            )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BaseFinetuning):
            raise ConfigError(
                f"{type(callback).__name__} unfreezes parameters during the training, which "
                f"newcomers would not know of; expected the same ones to train throughout. Fit "
                f"once for each stage, from the checkpoint of the one before."
            )
        if isinstance(callback, LearningRateFinder):
            raise ConfigError(
                "The learning-rate finder goes back to the weights it began with, which elastic "
                "training takes for those of another job; expected a fit without it. Find the rate "
                "under strategy='zero2', or whichever the scheme is, first."
            )
        if isinstance(callback, GradientAccumulationScheduler) and len(callback.scheduling) > 1:
            raise ConfigError(
                "GradientAccumulationScheduler and elastic training would both set how many "
                "batches are accumulated. Leave the callback out; see global_batch_size."
            )
