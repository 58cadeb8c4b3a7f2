"""Fits that go wrong in a known way, recorded, on ranks of any kind."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.replay import RecordSteps, Replayed, replay
from tests.strategies.models import TiedLSTM
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    STRATEGIES,
    GlobalBatches,
    ignore_upstream_warnings,
    quiet_trainer,
)

NUM_STEPS = 5


class Dropping(TiedLSTM):
    """Drops out, normalises by batches, and has a frozen layer, all drawn at random."""

    def __init__(self, width: int = 24) -> None:
        super().__init__(width, dropout=0.2)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.norm = nn.BatchNorm1d(width)

    def loss(self, batch: list[Tensor]) -> Tensor:
        text, following = batch
        output, _ = self.lstm(self.frozen(self.embedding(text)))
        output = self.norm(output.transpose(1, 2)).transpose(1, 2)
        return nn.functional.cross_entropy(self.head(output).flatten(0, 1), following.flatten())


class Failing(pl.Callback):
    """Raises on a rank in a step, with the bits of what all ranks have summed up."""

    def __init__(self, rank: int = 2, step: int = 3) -> None:
        self._rank, self._step = rank, step

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        norm = trainer.strategy.gradient_norm(optimizer).item()  # type: ignore[attr-defined]
        if (trainer.strategy.mesh_rank, trainer.global_step) == (self._rank, self._step):
            raise ValueError(f"the norm is {norm.hex()} at {optimizer.param_groups[0]['lr'].hex()}")


class NotFinite(pl.Callback):
    """Makes the loss of one rank infinite from a step on."""

    def __init__(self, rank: int = 1, step: int = 2) -> None:
        self._rank, self._step = rank, step

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        is_it = trainer.strategy.mesh_rank == self._rank and trainer.global_step >= self._step
        with torch.no_grad():
            pl_module.frozen.bias.fill_(float("inf") if is_it else 0.0)  # type: ignore[union-attr]


def fit(
    folder: Path,
    strategy: str,
    *,
    ranks: int = 4,
    backend: str = "in_process",
    callbacks: list[pl.Callback] | None = None,
    module: pl.LightningModule | None = None,
    recording: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Fit with a recording callback; the module has other values than a fresh one."""
    torch.manual_seed(11)
    module = module or Dropping()
    made = STRATEGIES[strategy](backend=backend, bucket_mb=SMALL_BUCKET_MB)
    recorder = RecordSteps(folder, **(recording or {}))
    trainer = quiet_trainer(
        strategy=made,
        devices=ranks,
        max_steps=NUM_STEPS,
        callbacks=[*(callbacks or ()), recorder],
        **options,
    )
    trainer.fit(module, datamodule=GlobalBatches(module, NUM_STEPS))  # type: ignore[arg-type]


def fit_in_processes(folder: Path, strategy: str, **options: Any) -> str:
    """Fit on processes over Gloo, of which one fails; return what this rank was raised."""
    ignore_upstream_warnings()
    recording = {"steps": [1], "results": True}
    options = {"backend": "gloo", "callbacks": [Failing()], "recording": recording, **options}
    try:
        fit(folder, strategy, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no rank has failed")


def replayed(
    folder: Path,
    step: int,
    strategy: str,
    *,
    callbacks: list[pl.Callback] | None = None,
    rank: int | None = None,
    module: pl.LightningModule | None = None,
) -> Replayed:
    """Replay a recorded step on a module of other values."""
    torch.manual_seed(99)
    return replay(
        folder / f"step-{step:08d}",
        module or Dropping(),
        strategy=STRATEGIES[strategy](bucket_mb=SMALL_BUCKET_MB),
        callbacks=callbacks or (),
        rank=rank,
    )
