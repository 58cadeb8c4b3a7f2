"""One small model on every layout, with the same global batches: its curve is the same on each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_shard import (
    DDPStrategy,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO1Strategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from tests.checkpoint.kept_runs import Regressor
from tests.trainers import SILENT, rank_loader

GLOBAL_BATCH = 12
SAVED_AFTER = 2
NUM_STEPS = 4


def _ranks(number: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return options for ranks in this process, unless they are processes by a launcher."""
    if options.get("backend", "in_process") == "in_process":
        options = {"backend": "in_process", "num_ranks": number, **options}
    return {"announce": False, **options}


LAYOUTS: dict[str, Callable[..., Any]] = {
    "shard_ddp-2": lambda **o: DDPStrategy(**_ranks(2, o)),
    "zero1-3": lambda **o: ZeRO1Strategy(**_ranks(3, o)),
    "zero2-2": lambda **o: ZeRO2Strategy(**_ranks(2, o)),
    "zero3-4": lambda **o: ZeRO3Strategy(**_ranks(4, o), bucket_mb=1e-3),
    "zero3-3": lambda **o: ZeRO3Strategy(**_ranks(3, o)),
    "tensor-4": lambda **o: TensorParallelStrategy(
        **_ranks(4, o), tensor_parallel_size=2, zero_stage=3
    ),
    "pipeline-2": lambda **o: PipelineParallelStrategy(**_ranks(2, o), num_microbatches=2),
    "hybrid-8": lambda **o: HybridParallelStrategy(
        **_ranks(8, o), pipeline_parallel_size=2, tensor_parallel_size=2, zero_stage=2
    ),
    "hybrid3-8": lambda **o: HybridParallelStrategy(
        **_ranks(8, o), pipeline_parallel_size=2, tensor_parallel_size=2, zero_stage=3
    ),
    "copies-4": lambda **o: HybridParallelStrategy(
        **_ranks(4, o), data_parallel_size=(2, 2), zero_stage=3
    ),
}


class Model(Regressor):
    """Blocks, a buffer, a scalar parameter, one that is frozen, and ranks' losses as one."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.dropout = nn.Dropout(dropout)
        self.embed.bias.requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the mean squared error of a rank's samples."""
        x, y = batch
        hidden = self.dropout(self.blocks(self.embed(x)))
        return (self.scale * self.head(hidden) + self.shift - y).square().mean()

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        """Return Adam in two groups, and its schedule."""
        first = list(self.embed.parameters())
        rest = [param for param in self.parameters() if all(param is not one for one in first)]
        groups = [{"params": first}, {"params": rest, "lr": 2e-2}]
        optimizer = torch.optim.Adam(groups, lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def train_dataloader(self) -> Any:
        """Return the rank's part of the same global batches."""
        generator = torch.Generator().manual_seed(1)
        data = [torch.randn(GLOBAL_BATCH * SAVED_AFTER, n, generator=generator) for n in (4, 1)]
        return rank_loader(self.trainer, TensorDataset(*data), GLOBAL_BATCH)

    val_dataloader = train_dataloader


def quiet_trainer(strategy: Any, **options: Any) -> L.Trainer:
    """Return a Trainer on the CPU that prints nothing."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": NUM_STEPS,
        **SILENT,
        "limit_val_batches": 0,
    }
    if not isinstance(strategy, str):
        del defaults["devices"]
    return L.Trainer(strategy=strategy, **(defaults | options))


def fit(strategy: Any, model: Model | None = None, **options: Any) -> Model:
    """Train to the last step; return the trained model with its losses."""
    resume = options.pop("ckpt_path", None)
    if model is None:
        torch.manual_seed(0)
        model = Model()
    quiet_trainer(strategy, **options).fit(model, ckpt_path=resume)
    return model


def saving(strategy: Any, folder: Path, model: Model | None = None, **options: Any) -> Path:
    """Train, and return the checkpoint of the second step."""
    writer = ModelCheckpoint(
        folder, "{step}", every_n_train_steps=SAVED_AFTER, save_top_k=-1,
        save_on_train_epoch_end=False,
    )  # fmt: skip
    fit(strategy, model, callbacks=[writer], enable_checkpointing=True, **options)
    return folder / f"step={SAVED_AFTER}.ckpt"
