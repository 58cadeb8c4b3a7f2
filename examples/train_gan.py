"""Train a generator of digits against a discriminator: two optimizers, stepped by hand.

Ordinary manual optimization of Lightning, as its documentation describes it; the strategy is said
on the command line:

    python examples/train_gan.py
    python examples/train_gan.py --trainer.strategy zero3_in_process \
        --trainer.accelerator cpu --trainer.devices 2
    lightning-shard fit --config configs/gan_zero2.yaml

The noise of each rank comes from its own part of one stream, so that two ranks generate what one
device with their batches together would.
"""

import warnings
from collections.abc import Callable

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn

from examples.train_digits import Digits

NUM_PIXELS = 64


class GAN(L.LightningModule):
    """A generator and a discriminator of three linear layers each.

    Args:
        noise_size: Numbers that an image is generated from.
        width: Of the hidden layers.
        learning_rate: Of both Adams.

    Source:
        arXiv:1406.2661, with the loss of its section 3 that does not saturate.
    """

    def __init__(self, noise_size: int = 16, width: int = 128, learning_rate: float = 5e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = layers(noise_size, width, NUM_PIXELS)
        self.discriminator = layers(NUM_PIXELS, width, 1)

    def forward(self, noise: Tensor) -> Tensor:
        """Generate: (B, noise_size) in, (B, 64) pixels between 0 and 1 out."""
        return self.generator(noise).sigmoid()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Step the discriminator, then the generator."""
        images = batch[0].flatten(1)  # (B, 64)
        of_generator, of_discriminator = self.optimizers()
        noise = self.noise_like(images)
        self.advance(of_discriminator, "discriminator", lambda: self.discriminate(images, noise))
        self.advance(of_generator, "generator", lambda: self.deceive(noise))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the share of generated images that the discriminator takes for real ones."""
        noise = self.noise_like(batch[0].flatten(1))
        fooled = (self.discriminator(self(noise)) > 0).float().mean()
        self.log("val_fooled", fooled, prog_bar=True, sync_dist=True)

    def noise_like(self, images: Tensor) -> Tensor:
        """Draw what the ranks' images are generated from, and keep this rank's part: (B, noise)."""
        ranks, count = self.trainer.world_size, len(images)
        generator = torch.Generator().manual_seed(self.global_step)
        noise = torch.randn(ranks, count, self.hparams["noise_size"], generator=generator)
        return noise[self.global_rank].to(images)

    def discriminate(self, images: Tensor, noise: Tensor) -> Tensor:
        """Return the discriminator's mean error on images and on generated ones."""
        real, made = self.discriminator(images), self.discriminator(self(noise).detach())
        return (F.softplus(-real).mean() + F.softplus(made).mean()) / 2

    def deceive(self, noise: Tensor) -> Tensor:
        """Return how far the generator is from deceiving the discriminator."""
        return F.softplus(-self.discriminator(self(noise))).mean()

    def advance(
        self, optimizer: torch.optim.Optimizer, name: str, compute: Callable[[], Tensor]
    ) -> None:
        """Take one step of one of the two; its own parameters alone have gradients."""
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        loss = compute()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        self.log(f"{name}_loss", loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return an Adam for each of the two."""
        rate = self.hparams["learning_rate"]
        return [
            torch.optim.Adam(network.parameters(), lr=rate, betas=(0.5, 0.999))
            for network in (self.generator, self.discriminator)
        ]


def layers(size_in: int, width: int, size_out: int) -> nn.Sequential:
    """Return three linear layers with activations between them."""
    return nn.Sequential(
        nn.Linear(size_in, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, size_out),
    )


def main() -> None:
    """Train."""
    import lightning_shard  # noqa: F401  the import registers the names of the strategies

    # Worker processes would have nothing to do, a few images validated twice do no harm, and
    # Lightning 2.6 uses a name that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", ".*(many workers|`DistributedSampler`|LeafSpec)")
    cli = LightningCLI(
        GAN,
        Digits,
        run=False,
        seed_everything_default=0,
        save_config_callback=None,
        trainer_defaults={"max_epochs": 15, "logger": False, "enable_checkpointing": False},
    )
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    for name in ("discriminator", "generator"):
        print(f"{name} loss {cli.trainer.callback_metrics[f'{name}_loss']:.3f}")


if __name__ == "__main__":
    main()
