"""Train a UNet of diffusers to draw discs, with the exponential average of its weights.

    python -m examples.recipes.diffusion
    python -m examples.recipes.diffusion --strategy zero2 --accelerator gpu --devices 8

Pictures, noise and steps are drawn from a seed, so that steps take the same on every number of
ranks. The average is diffusers' own `EMAModel`, saved and loaded by diffusers.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_shard  # noqa: F401  the import registers the names of the strategies

try:
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel
except ModuleNotFoundError as error:
    raise SystemExit(f"This recipe needs {error.name}: pip install diffusers") from None

SIZE, NUM_STEPS = 8, 50  # of pictures; of the diffusion
FOLDER = Path("build/recipes/diffusion")


class Denoiser(L.LightningModule):
    """A UNet that predicts the noise in a picture, and the average of its weights.

    Args:
        decay: Of the average, at most.
    """

    def __init__(self, decay: float = 0.95) -> None:
        super().__init__()
        self.decay = decay
        self.network = UNet2DModel(
            sample_size=SIZE,
            in_channels=1,
            out_channels=1,
            layers_per_block=1,
            block_out_channels=(16, 32),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
        )

    def on_fit_start(self) -> None:
        """Begin the average."""
        kinds = {"model_cls": UNet2DModel, "model_config": self.network.config}
        self.average = EMAModel(self.network.parameters(), self.decay, **kinds)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return how much of the noise is not predicted, 1 where nothing is known."""
        loss = noise_left(self.network, batch)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Let the average follow."""
        self.average.step(self.network.parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Optimise with AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=4e-3)


def noise_left(network: torch.nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean square of the noise that the network leaves."""
    pictures, noise, steps = batch  # (B, 1, 8, 8) each, (B,)
    noisy = DDPMScheduler(num_train_timesteps=NUM_STEPS).add_noise(pictures, noise, steps)
    return F.mse_loss(network(noisy, timestep=steps).sample, noise)


def discs(number: int, seed: int) -> TensorDataset:
    """Draw so many pictures of a disc, with the noise and the step to learn from."""
    random = torch.Generator().manual_seed(seed)
    centers = 2 + 4 * torch.rand(number, 2, 1, 1, generator=random)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    distances = (rows - centers[:, 0]).square() + (columns - centers[:, 1]).square()
    pictures = (4 - distances).clamp(-1, 1)[:, None]
    noise = torch.randn(pictures.shape, generator=random)
    return TensorDataset(pictures, noise, torch.randint(NUM_STEPS, (number,), generator=random))


def train(batch_size: int = 32, steps: int = 100, **options: Any) -> tuple[L.Trainer, Denoiser]:
    """Train on batches of so many pictures on each rank."""
    warnings.filterwarnings("ignore", ".*(many workers|LeafSpec)")
    L.seed_everything(0, verbose=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_steps=steps, enable_checkpointing=False, **quiet, **options)
    model = Denoiser()
    trainer.fit(model, DataLoader(discs(64 * 100, seed=0), batch_size, shuffle=True))
    return trainer, model


def main() -> None:
    """Train, save the average, load it again, and say what both leave of the noise."""
    parser = argparse.ArgumentParser(description="Train a UNet of diffusers with an average.")
    parser.add_argument("--strategy", default="zero2_in_process")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    options = vars(parser.parse_args())
    trainer, model = train(64 // options["devices"], **options)
    if trainer.is_global_zero:
        model.average.save_pretrained(FOLDER)
        network, new = model.network.eval().requires_grad_(False), discs(1024, seed=1).tensors
        left = noise_left(network, new)
        EMAModel.from_pretrained(FOLDER, UNet2DModel).copy_to(network.parameters())
        print(f"noise left {left:.3f}, by the average {noise_left(network, new):.3f}")


if __name__ == "__main__":
    main()
