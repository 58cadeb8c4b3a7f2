"""A run that is interrupted and resumed, beside one that is not: shuffled data, dropout, Adam."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_shard import (
    DDPStrategy,
    HybridParallelStrategy,
    LocalSGDStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from tests.checkpoint.kept_runs import Block
from tests.strategies.parity import UPSTREAM_WARNINGS
from tests.trainers import cpu_trainer

RANKS: dict[str, Any] = {"backend": "in_process", "num_ranks": 2, "announce": False}
EPOCH_BATCHES = 4
# What makes a strategy of these ranks, by name.
SCHEMES: dict[str, Callable[[], Any]] = {
    "shard_ddp": lambda: DDPStrategy(**RANKS),
    "zero2": lambda: ZeRO2Strategy(**RANKS),
    "zero3": lambda: ZeRO3Strategy(**RANKS),
    "tensor_parallel": lambda: TensorParallelStrategy(**RANKS),
    "pipeline_parallel": lambda: PipelineParallelStrategy(**RANKS, num_microbatches=2),
    "hybrid_parallel": lambda: HybridParallelStrategy(
        **(RANKS | {"num_ranks": 4}),
        pipeline_parallel_size=2,
        tensor_parallel_size=1,
        zero_stage=1,
        num_microbatches=2,
    ),
    "local_sgd": lambda: LocalSGDStrategy(**RANKS, sync_every=3),
}
IGNORED = [*UPSTREAM_WARNINGS, "Be aware that when using `ckpt_path`"]


class Dropping(L.LightningModule):
    """Blocks with dropout between them."""

    def __init__(self, optimizer: Any = None, workers: int = 0) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.Sequential(*[nn.Sequential(Block(), nn.Dropout(0.3)) for _ in range(2)])
        self.head = nn.Linear(8, 1)
        self._make = optimizer or (lambda params: torch.optim.Adam(params, lr=1e-2))
        self._workers = workers
        self.losses: list[float] = []

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return (self.head(self.blocks(self.embed(x))) - y).square().mean()

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.strategy.reduce(outputs["loss"].detach())))

    @override
    def configure_optimizers(self) -> Any:
        return self._make(self.parameters())

    @override
    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        samples = EPOCH_BATCHES * 4 * self.trainer.strategy.data_collectives.size
        data = [torch.randn(samples, n, generator=generator) for n in (4, 1)]
        return DataLoader(TensorDataset(*data), 4, shuffle=True, num_workers=self._workers)


class SaveAt(L.Callback):
    """Saves after a step, or at the end of an epoch."""

    def __init__(self, path: Path, step: int, *, at_epoch_end: bool = False) -> None:
        self._path, self._step, self._at_epoch_end = path, step, at_epoch_end
        self._has_saved = False

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not self._at_epoch_end:
            self._save(trainer)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self._at_epoch_end:
            self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        if trainer.global_step == self._step and not self._has_saved:
            trainer.save_checkpoint(self._path)
            self._has_saved = True


def fit(
    strategy: Any,
    num_steps: int,
    callbacks: Sequence[L.Callback] = (),
    *,
    resume: Path | None = None,
    make_module: Callable[[], Any] = Dropping,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Train; return the module."""
    torch.manual_seed(seed)
    model = make_module()
    options = {"max_steps": num_steps} | options
    trainer = cpu_trainer(strategy=strategy, callbacks=list(callbacks), **options)
    trainer.fit(model, ckpt_path=resume)
    return model


def deviation(got: nn.Module, expected: nn.Module) -> float:
    """Return the greatest difference of two modules' parameters and buffers."""
    mine, theirs = got.state_dict(), expected.state_dict()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in theirs)


def with_a_break(
    make: Callable[[], Any],
    path: Path,
    *,
    at: int,
    num_steps: int,
    make_module: Callable[[], Any] = Dropping,
) -> tuple[Any, Any]:
    """Train with a break after `at` steps, and without one; return both modules."""
    whole = fit(make(), num_steps, [SaveAt(path, at)], make_module=make_module)
    broken = fit(make(), num_steps, resume=path, make_module=make_module, seed=77)
    return broken, whole
