"""Step time of a pipeline: ours and torch's, taking turns; and our idle share beside theory.

    python -m tests.benchmarks.pipeline

Two Gloo processes of one thread train one model of equal blocks, half of them each.

| name          | what it is                                                                   |
|---------------|------------------------------------------------------------------------------|
| `ours`        | the strategy's `training_step` and `backward`, and the optimizer's step      |
| `lightning`   | the same through Lightning's own loop, with its hooks and a logged loss      |
| `torch`       | `torch.distributed.pipelining` by hand: PipelineStage and the schedule's step |
| `torch_again` | the same once more: the difference of the two is the noise                   |

Ours takes the whole module with its `training_step`, and gives the loss to both ranks; torch's gets
two ready-made halves of the model, and has the loss on the last rank only.
"""

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

import lightning as L  # noqa: N812
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import PipelineParallelStrategy
from tests.benchmarks.ranks import NUM_RANKS, on_ranks
from tests.benchmarks.tensor_parallel import Block
from tests.benchmarks.timing import LOSS_TOLERANCE, LossMismatchError, Ratio, Record, turn_order

GOAL = 1.05
LENGTH = 64
SIZES = {"wide": (256, 4, 4), "narrow": (128, 4, 2)}  # width, blocks, samples of a microbatch
SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
Batch = tuple[Tensor, Tensor]


class Contender(Protocol):
    """One way to train the model."""

    def step(self, batch: Batch) -> float:
        """Train on a batch; return the loss, on the last rank at least."""


class Model(L.LightningModule):
    """A stack of blocks; the loss is a mean square."""

    def __init__(self, size: str, *, logs: bool) -> None:
        super().__init__()
        width, num_blocks, _ = SIZES[size]
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.logs = logs

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, target = batch
        for block in self.blocks:
            x = block(x)
        loss = F.mse_loss(x, target)
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class Torch:
    """A loop by hand over torch's pipeline."""

    def __init__(self, size: str, schedule: str, num_microbatches: int) -> None:
        blocks = list(Model(size, logs=False).blocks)
        rank, half = dist.get_rank(), len(blocks) // NUM_RANKS
        part = nn.Sequential(*blocks[rank * half : (rank + 1) * half])
        stage = PipelineStage(part, rank, NUM_RANKS, torch.device("cpu"))
        self.schedule = SCHEDULES[schedule](stage, num_microbatches, loss_fn=F.mse_loss)
        self.optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3, fused=True)

    def step(self, batch: Batch) -> float:
        x, target = batch
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        if dist.get_rank() == 0:
            self.schedule.step(x)
            return 0.0
        self.schedule.step(target=target, losses=losses)
        self.optimizer.step()
        return torch.stack(losses).mean().item()


class Ours:
    """What Lightning's loop calls of the strategy in a step."""

    def __init__(self, trainer: L.Trainer) -> None:
        assert isinstance(trainer.strategy, PipelineParallelStrategy)
        self.strategy = trainer.strategy
        self.optimizer = trainer.strategy.optimizers[0]

    def step(self, batch: Batch) -> float:
        loss: Tensor = self.strategy.training_step(batch, 0)
        self.optimizer.zero_grad()
        self.strategy.backward(loss, None)
        self.optimizer.step()
        return loss.item()


class Lightning:
    """Lightning's loop over one batch."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer

    def step(self, batch: Batch) -> float:
        loop = self.trainer.fit_loop.epoch_loop.automatic_optimization
        output = loop.run(self.trainer.optimizers[0], 0, {"batch": batch, "batch_idx": 0})
        return output["loss"].item()
