"""Train a small convolutional network on scikit-learn's handwritten digits, then test it.

Ordinary Lightning, with a torchmetrics metric; the scheme is said on the command line:

    python examples/train_digits.py
    python examples/train_digits.py --trainer.strategy zero2_in_process \
        --trainer.accelerator cpu --trainer.devices 2
    lightning-shard fit --config configs/digits_zero2.yaml

scikit-learn carries the 1,797 images of 8x8 pixels in its package: nothing is downloaded.
"""

import warnings

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

NUM_CLASSES = 10
NUM_TRAIN, NUM_VAL, NUM_TEST = 1200, 297, 300


class DigitClassifier(L.LightningModule):
    """Two convolutions and two linear layers.

    Args:
        width: Channels of the first convolution; the second has twice as many.
        learning_rate: Of AdamW.
    """

    def __init__(self, width: int = 16, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 2 * 2, 64),
            nn.ReLU(),
            nn.Linear(64, NUM_CLASSES),
        )
        self.val_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.test_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Classify: (B, 1, 8, 8) images in, (B, 10) logits out."""
        return self.layers(images)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy of one batch."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Count the right answers among the validation images."""
        images, labels = batch
        self.val_accuracy(self(images), labels)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Count the right answers among the test images."""
        images, labels = batch
        self.test_accuracy(self(images), labels)
        self.log("test_accuracy", self.test_accuracy)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Name the digit of each image: (B,)."""
        images, _ = batch
        return self(images).argmax(dim=-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Optimise with AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


class Digits(L.LightningDataModule):
    """The digits, shuffled once and split into training, validation and test images.

    Args:
        batch_size: Images per batch on each rank.
    """

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Read the images, the same order on each rank."""
        pixels, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        parts = order.split([NUM_TRAIN, NUM_VAL, NUM_TEST])
        labels = torch.tensor(labels)
        self.train, self.val, self.test = (TensorDataset(images[p], labels[p]) for p in parts)

    def train_dataloader(self) -> DataLoader:
        """Iterate over the training images in random order."""
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Iterate over the validation images."""
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader:
        """Iterate over the test images."""
        return DataLoader(self.test, batch_size=self.batch_size)

    def predict_dataloader(self) -> DataLoader:
        """Iterate over the test images."""
        return self.test_dataloader()


def main() -> None:
    """Train, then test."""
    import lightning_shard  # noqa: F401  the import registers the names of the strategies

    # Worker processes would have nothing to do, a few images tested twice do no harm, and
    # Lightning 2.6 uses a name that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", ".*(many workers|`DistributedSampler`|LeafSpec)")
    cli = LightningCLI(
        DigitClassifier,
        Digits,
        run=False,
        seed_everything_default=0,
        save_config_callback=None,
        trainer_defaults={"max_epochs": 15, "logger": False, "enable_checkpointing": False},
    )
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    cli.trainer.test(cli.model, datamodule=cli.datamodule)


if __name__ == "__main__":
    main()
