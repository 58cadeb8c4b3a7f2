"""Runs that a signal ends in the middle, and those that go on from what was saved then."""

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_shard import ZeRO3Strategy
from lightning_shard.errors import RankFailedError
from tests.checkpoint.interrupted import Dropping, fit
from tests.strategies.parity import ignore_upstream_warnings


class Sends(L.Callback):
    """Sends this process a signal, twice at once, in the first of such hooks of one rank."""

    def __init__(self, hook: str, step: int, signum: int = signal.SIGTERM) -> None:
        self._when, self._signum = (hook, step, 1), signum
        self._has_sent = False  # one that comes again after seconds would end the process

    def _come(self, hook: str, trainer: L.Trainer) -> None:
        here = (hook, trainer.global_step, trainer.strategy.mesh_rank)
        if here == self._when and not (self._has_sent or trainer.sanity_checking):
            self._has_sent = True
            for _ in range(2):
                os.kill(os.getpid(), self._signum)
            _wait_until_it_is_handled(trainer.strategy)

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._come("on_train_batch_start", trainer)

    @override
    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._come("on_validation_batch_end", trainer)

    @override
    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._come("on_validation_end", trainer)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._come("on_train_epoch_end", trainer)


def _wait_until_it_is_handled(strategy: Any) -> None:
    """Python handles signals on the main thread, which this rank's may leave no time on a host."""
    lifeline, end = strategy.run.termination.lifeline, monotonic() + 60
    if not hasattr(lifeline, "was_terminated"):
        return
    while not (lifeline.was_terminated or lifeline.requeues) and monotonic() < end:
        sleep(0.01)


class Validating(Dropping):
    """Validates, and draws random numbers there; notes the metric of each validation."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.validations: list[float] = []

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        loss = (self.head(self.blocks(self.embed(x))) - y).square().mean() + 0 * torch.rand(())
        self.log("loss", loss, sync_dist=True)

    @override
    def on_validation_epoch_end(self) -> None:
        self.validations.append(float(self.trainer.callback_metrics["loss"]))

    @override
    def val_dataloader(self) -> Any:
        return DataLoader(self.train_dataloader().dataset, 4)


class Seeing(Dropping):
    """Notes the samples of each step, of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[list[float]] = []

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        rows = self.trainer.strategy.all_gather(batch[1].flatten())
        self.samples.append(sorted(rows.flatten().tolist()))
        return super().training_step(batch, batch_idx)

    @classmethod
    def fitted(cls, strategy: Any, folder: Path) -> Any:
        """Return one that was trained without a break."""
        return fit(strategy, 9, make_module=cls, default_root_dir=folder, num_sanity_val_steps=0)


def seen(*modules: Any) -> tuple[list[float], list[float]]:
    """Return the losses of all steps and of all validations, one module's after the other's."""
    losses = [loss for one in modules for loss in one.losses]
    return losses, [loss for one in modules for loss in getattr(one, "validations", ())]


def preempted(
    strategy: Any,
    folder: Path,
    sends: L.Callback,
    *,
    make_module: Callable[[], Any] = Dropping,
    **options: Any,
) -> Any:
    """Train until the signal ends the fit; return the module."""
    torch.manual_seed(0)
    model = make_module()
    saves = [sends, ModelCheckpoint(folder)]
    torch.manual_seed(0)
    with pytest.raises(SIGTERMException) as caught:
        fit(strategy, 9, saves, make_module=_again(model, make_module), **_with_saves(options))
    assert caught.value.code == 128 + signal.SIGTERM
    return model


def resumed(
    strategy: Any, folder: Path, *, make_module: Callable[[], Any] = Dropping, **options: Any
) -> Any:
    """Go on from the newest checkpoint of the folder, to the end; return the module."""
    last: Any = options.pop("resume", "last")
    return fit(
        strategy,
        9,
        [ModelCheckpoint(folder)],
        resume=last,
        make_module=make_module,
        seed=77,
        **_with_saves(options),
    )


def steps_saved(folder: Path) -> dict[str, int]:
    """Return the step of each checkpoint of a folder, by name."""
    files = folder.glob("*.ckpt")
    return {file.name: torch.load(file, weights_only=False)["global_step"] for file in files}


def _again(model: Any, make_module: Callable[[], Any]) -> Callable[[], Any]:
    """Make a module's values anew in itself, so that it is known though its fit raises."""

    def make() -> Any:
        model.load_state_dict(make_module().state_dict())
        return model

    return make


def _with_saves(options: dict[str, Any]) -> dict[str, Any]:
    return {"enable_checkpointing": True, "num_sanity_val_steps": 0, **options}


def train_until(folder: Path, backend: str, signum: int) -> tuple[Any, Any, str]:
    """As a rank of its own process: train without and with a signal to rank 1.

    Returns:
        What both fits have seen, and the error that has ended the second.
    """
    ignore_upstream_warnings()
    _pretend_slurm()
    whole = fit(ZeRO3Strategy(backend=backend), 9, devices=2)
    torch.manual_seed(0)
    model, saves = Dropping(), [Sends("on_train_batch_start", 5, signum), ModelCheckpoint(folder)]
    error = ""
    try:
        fit(
            ZeRO3Strategy(backend=backend),
            9,
            saves,
            make_module=_again(model, Dropping),
            devices=2,
            default_root_dir=folder,
            enable_checkpointing=True,
        )
    except (SIGTERMException, RankFailedError) as ended:
        error = type(ended).__name__
    return seen(model), seen(whole), error


def go_on(folder: Path, backend: str, signum: int) -> Any:
    """As a rank of its own process: go on from what is saved; return what the fit has seen."""
    ignore_upstream_warnings()
    _pretend_slurm()
    return seen(
        resumed(
            ZeRO3Strategy(backend=backend),
            folder,
            resume="last" if signum == signal.SIGTERM else None,
            devices=2,
            default_root_dir=folder,
        )
    )


def _pretend_slurm() -> None:
    """Let Lightning find SLURM, unless mpirun has started this process."""
    warnings.filterwarnings("ignore", ".*Checkpoint directory")
    warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
    if "RANK" not in os.environ:
        return
    rank = os.environ["RANK"]
    os.environ |= {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "train",
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NODEID": "0",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "localhost",
    }
