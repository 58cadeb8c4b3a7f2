"""Elastic fits of a small model that say what was trained on when, and what losses came of it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import ElasticStrategy
from lightning_shard.testing import Fault, injected_faults
from tests.trainers import SILENT

NUM_SAMPLES = 100  # no multiple of the 16 samples of a step: the last one of an epoch is smaller
BATCH_SIZE = 4
STEPS_PER_EPOCH = 7


@dataclass(frozen=True)
class Attempt:
    """One microbatch of one rank."""

    generation: int
    epoch: int
    step: int
    rank: int
    weight: float
    samples: tuple[int, ...]
    losses: tuple[float, ...]


@dataclass
class Journal:
    """What all ranks of a fit did; shared by the copies of a module."""

    attempts: list[Attempt] = field(default_factory=list)
    hooks: list[tuple[str, int]] = field(default_factory=list)  # of rank 0
    validations: dict[int, float] = field(default_factory=dict)  # by step

    def __deepcopy__(self, memo: dict[int, Any]) -> "Journal":
        return self

    def counted(self) -> dict[tuple[int, int], list[Attempt]]:
        """The attempts that count, by epoch and step: those of the last generation to try it."""
        newest: dict[tuple[int, int], list[Attempt]] = {}
        for one in self.attempts:
            others = newest.setdefault((one.epoch, one.step), [])
            if others and others[0].generation < one.generation:
                others.clear()
            if one.weight > 0 and (not others or others[0].generation == one.generation):
                others.append(one)
        return newest

    def losses(self) -> dict[int, float]:
        """The mean loss of each step's samples."""
        means = {}
        for (_, step), attempts in self.counted().items():
            losses = [loss for one in attempts for loss in one.losses]
            means[step] = sum(losses) / len(losses)
        return means

    def samples(self) -> dict[int, list[int]]:
        """The samples of each epoch, sorted, each as often as it counted."""
        seen: dict[int, list[int]] = {}
        for (epoch, _), attempts in self.counted().items():
            seen.setdefault(epoch, []).extend(s for one in attempts for s in one.samples)
        return {epoch: sorted(samples) for epoch, samples in seen.items()}


class Classifier(L.LightningModule):
    """Writes a journal."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.journal = journal
        self.hidden = nn.Linear(8, 24)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map points, (N, 8), to logits, (N, 4)."""
        return self.head(torch.tanh(self.hidden(x)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y, numbers = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        strategy: Any = self.trainer.strategy
        self.journal.attempts.append(
            Attempt(
                generation=strategy.generation.number,
                epoch=self.current_epoch,
                step=self.global_step,
                rank=self.global_rank,
                weight=strategy.elastic_run.data_assignment.weight(batch_idx),
                samples=tuple(numbers.tolist()),
                losses=tuple(losses.tolist()),
            )
        )
        loss = losses.mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y, _ = batch
        self.log("val_loss", F.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Hooks(Callback):
    """Writes the hooks of whoever is rank 0 into the journal."""

    def _note(self, name: str, trainer: "L.Trainer", module: Classifier) -> None:
        if trainer.global_rank == 0:
            module.journal.hooks.append((name, trainer.current_epoch))

    def on_train_start(self, trainer: "L.Trainer", pl_module: Classifier) -> None:
        self._note("train", trainer, pl_module)

    def on_train_epoch_start(self, trainer: "L.Trainer", pl_module: Classifier) -> None:
        self._note("epoch", trainer, pl_module)

    def on_train_epoch_end(self, trainer: "L.Trainer", pl_module: Classifier) -> None:
        self._note("epoch end", trainer, pl_module)

    def on_validation_end(self, trainer: "L.Trainer", pl_module: Classifier) -> None:
        loss = trainer.callback_metrics["val_loss"].item()
        pl_module.journal.validations[trainer.global_step] = loss


def samples() -> TensorDataset:
    """Points in a plane's quadrants, with their numbers."""
    x = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long(), torch.arange(len(x)))


def fit(
    faults: Iterable[Fault] = (),
    *,
    num_ranks: int = 4,
    max_epochs: int = 2,
    trainer_options: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    module: Classifier | None = None,
    **options: Any,
) -> tuple[Journal, L.Trainer]:
    """Fit on in-process ranks while things go wrong."""
    L.seed_everything(1, verbose=False)
    torch.set_num_threads(1)
    module, data = module or Classifier(Journal()), samples()
    options_of_trainer = trainer_options or {}
    strategy = ElasticStrategy(
        backend="in_process", num_ranks=num_ranks, **{"snapshot_every": 3, **options}
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        **{
            "max_epochs": max_epochs,
            **SILENT,
            "num_sanity_val_steps": 0,
            **options_of_trainer,
            "callbacks": [Hooks(), *options_of_trainer.get("callbacks", [])],
        },
    )
    with injected_faults(faults):
        trainer.fit(
            module,
            DataLoader(data, batch_size=BATCH_SIZE, shuffle=True),
            DataLoader(data, batch_size=10),
            ckpt_path=ckpt_path,
        )
    return module.journal, trainer
