"""What the benchmark of convergence trains: the example GPT, and the digits under noise.

Plain digits end at a loss near 0, of which a few images decide, and under a constant learning rate
the last steps decide as much as all before: seeds would differ by more than methods do. Here images
carry noise, drawn anew for each batch, so that the loss stays far from 0 and nothing is learnt by
heart; and the learning rate follows half a cosine down to 0. The model is the example's.
"""

import math
from typing import Any

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from examples.train_digits import DigitClassifier, Digits
from examples.train_gpt import GPT, Text

NOISE = 0.5  # standard deviation, where pixels lie in 0..1
NUM_WARMUP_STEPS = 20
NUM_DRAWS = 4


class NoisyDigitClassifier(DigitClassifier):
    """The example's model; sees each training image under another noise, logs the loss."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return super().training_step([images + NOISE * torch.randn_like(images), labels], 0)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("val_loss", F.cross_entropy(self(images), labels), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = LambdaLR(optimizer, self._learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _learning_rate_factor(self, step: int) -> float:
        rise = min(1.0, (step + 1) / NUM_WARMUP_STEPS)
        return rise * 0.5 * (1 + math.cos(math.pi * step / self.trainer.max_steps))


class NoisyDigits(Digits):
    """Validates on what the example keeps for validation and test, under several draws of noise."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        images, labels = (
            torch.cat(parts).repeat_interleave(NUM_DRAWS, 0)
            for parts in zip(self.val.tensors, self.test.tensors, strict=True)
        )
        noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
        self.val = TensorDataset(images + NOISE * noise, labels)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, batch_size=199)  # 3 batches on each of 4 ranks, none twice


class QuicklyValidatedText(Text):
    """Validates in large batches: the same loss, in less time."""

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val_blocks, batch_size=64)


def _gpt() -> tuple[L.LightningModule, L.LightningDataModule]:
    return GPT(), QuicklyValidatedText(batch_size=4)


def _digits() -> tuple[L.LightningModule, L.LightningDataModule]:
    return NoisyDigitClassifier(), NoisyDigits(batch_size=8)


TASKS = {"gpt": _gpt, "digits": _digits}
