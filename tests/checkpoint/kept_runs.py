"""Small runs, one per strategy, whose checkpoints are kept as files: those must load for ever.

    python -m tests.checkpoint.kept_runs FOLDER     writes FOLDER/<run>.ckpt and FOLDER/losses.json

A run's checkpoint is of its second step; its losses are those of a run that goes on from it. Files
are written once for a format and never again: a later version of the package has to read them.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_shard import (
    AsyncSGDStrategy,
    DDPStrategy,
    ElasticStrategy,
    HybridParallelStrategy,
    LocalSGDStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO1Strategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from lightning_shard.data_parallel.compression import OneBit
from tests.trainers import cpu_trainer

SAVED_AFTER = 2
NUM_STEPS = 5
RANKS: dict[str, Any] = {"backend": "in_process", "num_ranks": 2, "announce": False}
GRID: dict[str, Any] = {**RANKS, "num_ranks": 4}
DILOCO: dict[str, Any] = {
    "class_path": "torch.optim.SGD",
    "init_args": {"lr": 0.7, "momentum": 0.9},
}

RUNS: dict[str, Callable[[], Any]] = {
    "shard_ddp": lambda: DDPStrategy(**RANKS),
    "zero1": lambda: ZeRO1Strategy(**RANKS),
    "zero2": lambda: ZeRO2Strategy(**RANKS),
    "zero3": lambda: ZeRO3Strategy(**RANKS),
    "tensor_parallel": lambda: TensorParallelStrategy(**RANKS),
    "pipeline_parallel": lambda: PipelineParallelStrategy(**RANKS, num_microbatches=2),
    "hybrid_parallel": lambda: HybridParallelStrategy(
        **GRID, pipeline_parallel_size=2, tensor_parallel_size=1, zero_stage=1, num_microbatches=2
    ),
    "hybrid_sharding": lambda: HybridParallelStrategy(
        **GRID, data_parallel_size=(2, 2), zero_stage=3
    ),
    "shard_ddp_topk": lambda: DDPStrategy(**RANKS, compression="topk"),
    "shard_ddp_int8": lambda: DDPStrategy(**RANKS, compression="int8"),
    "shard_ddp_powersgd": lambda: DDPStrategy(**RANKS, compression="powersgd"),
    "shard_ddp_onebit": lambda: DDPStrategy(**RANKS, compression=OneBit(warmup_steps=1)),
    "zero1_int8": lambda: ZeRO1Strategy(**RANKS, compression="int8"),
    "local_sgd": lambda: LocalSGDStrategy(**RANKS, sync_every=3),
    "diloco": lambda: LocalSGDStrategy(**RANKS, sync_every=2, outer_optimizer=DILOCO),
    "async_sgd": lambda: AsyncSGDStrategy(**RANKS),
    "elastic": lambda: ElasticStrategy(**RANKS, scheme="zero2", snapshot_every=1),
}


class Block(nn.Module):
    """Two linear layers around a nonlinearity, which tensor parallelism splits."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Add to what comes; shapes (N, 8)."""
        return x + self.down(torch.relu(self.up(x)))


class Regressor(L.LightningModule):
    """A stack of blocks with a buffer; Adam with a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.Sequential(*[Block() for _ in range(2)])
        self.head = nn.Linear(8, 1)
        self.register_buffer("shift", torch.full((1,), 0.5))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the mean squared error of a rank's samples."""
        x, y = batch
        return (self.head(self.blocks(self.embed(x))) + self.shift - y).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the loss, averaged over ranks."""
        self.losses.append(float(self.trainer.strategy.reduce(outputs["loss"].detach())))

    def configure_optimizers(self) -> Any:
        """Return Adam and its schedule."""
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def train_dataloader(self) -> Any:
        """Return the same samples every time."""
        generator = torch.Generator().manual_seed(1)
        data = [torch.randn(64, n, generator=generator) for n in (4, 1)]
        dataset = TensorDataset(*data)
        # Ranks of one data rank shuffled, too, when the files were written.
        sampler = DistributedSampler(dataset, 1, 0) if self.trainer.world_size == 1 else None
        return DataLoader(dataset, 4, sampler=sampler)


def fit(strategy: Any, folder: Path, resume: Path | None = None) -> Regressor:
    """Train to the last step; write `folder/step=2.ckpt` on the way unless it resumes."""
    torch.manual_seed(0)
    model = Regressor()
    saving = ModelCheckpoint(
        folder,
        "{step}",
        every_n_train_steps=SAVED_AFTER,
        save_top_k=-1,
        save_on_train_epoch_end=False,
    )
    trainer = cpu_trainer(
        strategy=strategy,
        max_steps=NUM_STEPS,
        limit_train_batches=SAVED_AFTER,  # a checkpoint of an epoch's end: no loader has to resume
        enable_checkpointing=True,
        callbacks=[saving],
    )
    trainer.fit(model, ckpt_path=resume, weights_only=False)
    return model


def write(folder: Path) -> None:
    """Write every run's checkpoint and the losses after it."""
    losses = {}
    for name, strategy in RUNS.items():
        with TemporaryDirectory() as scratch:
            fit(strategy(), Path(scratch))
            kept = Path(
                shutil.copy(Path(scratch, f"step={SAVED_AFTER}.ckpt"), folder / f"{name}.ckpt")
            )
            losses[name] = fit(strategy(), Path(scratch, "resumed"), resume=kept).losses
    (folder / "losses.json").write_text(json.dumps(losses, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
