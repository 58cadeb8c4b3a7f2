"""Train an encoder of digits with a contrastive loss over the global batch, as SimCLR and CLIP do.

Each image is seen twice, with different noise. The loss asks which of all second views belongs to
which first view, among the images of every rank: `self.all_gather(..., sync_grads=True)`.

    python examples/contrastive.py
    python examples/contrastive.py --trainer.strategy zero3_in_process \
        --trainer.accelerator cpu --trainer.devices 2

Every rank computes the loss of the whole global batch. The gradient of what a rank has given is
the sum over the ranks that use it, and the strategy takes the mean over ranks of the gradients of
parameters: together exactly the gradient on one device with that batch. Do not divide or multiply
by the number of ranks.
"""

import warnings

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def contrastive_loss(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Return the mean cross-entropy of finding each view's partner, in both directions.

    Args:
        first: Shape (B, D), embeddings of length 1.
        second: Shape (B, D), of the same images in the same order.
        temperature: What similarities are divided by.

    Source:
        InfoNCE, arXiv:1807.03748; symmetric as in CLIP, arXiv:2103.00020.
    """
    logits = first @ second.T / temperature  # (B, B)
    partners = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, partners) + F.cross_entropy(logits.T, partners)) / 2


class Block(nn.Module):
    """A residual block of two linear layers.

    Args:
        width: Of the residual stream.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape: (B, width)."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ContrastiveEncoder(L.LightningModule):
    """Residual blocks over pixels.

    Args:
        width: Of each layer.
        num_blocks: How many.
        temperature: Of the loss.
        learning_rate: Of AdamW.
    """

    def __init__(
        self,
        width: int = 64,
        num_blocks: int = 3,
        temperature: float = 0.2,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 32)

    def forward(self, images: Tensor) -> Tensor:
        """Embed: (B, 64) pixels in, (B, 32) vectors of length 1 out."""
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return F.normalize(self.head(x), dim=-1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss of the global batch, the same on every rank."""
        own = torch.stack(self(torch.cat(batch)).chunk(2), dim=1)  # (B, 2, D)
        every: Tensor = self.all_gather(own, sync_grads=True)
        views = every.flatten(0, -3)  # (ranks, B, 2, D), and on one device (B, 2, D)
        loss = contrastive_loss(views[:, 0], views[:, 1], self.hparams["temperature"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Optimise with AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["learning_rate"])


class TwoViews(L.LightningDataModule):
    """scikit-learn's digits, each with noise in two ways.

    Args:
        batch_size: Images per batch on each rank.
        noise: Standard deviation; pixels are between 0 and 1.
    """

    def __init__(self, batch_size: int = 32, noise: float = 0.2) -> None:
        super().__init__()
        self.batch_size, self.noise = batch_size, noise

    def setup(self, stage: str) -> None:
        """Make the views, the same on each rank."""
        pixels, _ = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32) / 16
        generator = torch.Generator().manual_seed(0)
        self.views = TensorDataset(
            *(images + self.noise * torch.randn(images.shape, generator=generator) for _ in "12")
        )

    def train_dataloader(self) -> DataLoader:
        """Iterate over the pairs of views in random order; batches are of one size on all ranks."""
        return DataLoader(self.views, batch_size=self.batch_size, shuffle=True, drop_last=True)


def main() -> None:
    """Train."""
    import lightning_shard  # noqa: F401  the import registers the names of the strategies

    # Worker processes would have nothing to do; Lightning 2.6 uses a name that torch 2.13
    # deprecates.
    warnings.filterwarnings("ignore", ".*(many workers|LeafSpec)")
    cli = LightningCLI(
        ContrastiveEncoder,
        TwoViews,
        run=False,
        seed_everything_default=0,
        save_config_callback=None,
        trainer_defaults={"max_epochs": 3, "logger": False, "enable_checkpointing": False},
    )
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    print(f"train loss {cli.trainer.callback_metrics['train_loss']:.3f}")


if __name__ == "__main__":
    main()
