"""Functions that Ray Train runs on its workers, and what they train."""

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_shard
from lightning_shard.ray import RayReportCallback, latest_checkpoint, prepare_trainer

NUM_STEPS = 20
GLOBAL_BATCH = 8
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Net(L.LightningModule):
    """Blocks of feed-forward layers with dropout, which a pipeline and tensor parallel can cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.last = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(inputs)))

    def training_step(self, batch: Any, index: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.relu(self.up(self.norm(inputs))))


class Losses(L.Callback):
    """Notes each step's loss, averaged over the ranks."""

    def __init__(self, log: Path | None = None) -> None:
        self.noted: list[float] = []
        self._log = log

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        loss = trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")
        self.noted.append(float(loss))
        if self._log is not None and trainer.is_global_zero:
            with self._log.open("a") as file:
                file.write(f"{trainer.global_step} {float(loss)!r} {trainer.world_size}\n")
