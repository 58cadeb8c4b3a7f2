"""diffusers: a UNet that predicts noise, and an exponential average of its weights."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.data import TensorDataset

from tests.features.columns import Here
from tests.features.declared import by
from tests.features.network import Report, weights
from tests.zoo.foreign.batches import Batches, logged
from tests.zoo.foreign.declared import use
from tests.zoo.subjects import NUM_SAMPLES, Trained, generator, images


class Denoising(Trained):
    """Diffusion as in the package's training example, with `EMAModel` after each step."""

    def __init__(self, network: Any) -> None:
        from diffusers import DDPMScheduler

        super().__init__(network)
        self.scheduler = DDPMScheduler(num_train_timesteps=10)
        self.average: Any = None

    def on_fit_start(self) -> None:
        from diffusers.training_utils import EMAModel

        self.average = EMAModel(
            self.network.parameters(),
            decay=0.5,
            model_cls=type(self.network),
            model_config=self.network.config,
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        picture, noise, step = batch
        noisy = self.scheduler.add_noise(picture, noise, step)
        loss = F.mse_loss(self.network(noisy, timestep=step).sample, noise)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.step(self.network.parameters())

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.network(batch[0], timestep=batch[2]).sample


def _samples() -> TensorDataset:
    """Return pictures with the noise and the step that each is trained on."""
    stream = generator()
    noise = torch.randn(NUM_SAMPLES, 3, 8, 8, generator=stream)
    steps = torch.randint(10, (NUM_SAMPLES,), generator=stream)
    return TensorDataset(*images(), noise, steps)


def _drawn(network: Any) -> Tensor:
    """Return what the package's pipeline draws with a network."""
    from diffusers import DDPMPipeline, DDPMScheduler

    pipeline = DDPMPipeline(network.eval(), DDPMScheduler(num_train_timesteps=10))
    pipeline.set_progress_bar_config(disable=True)
    drawn = pipeline(generator=generator(), num_inference_steps=2, output_type="np").images
    return torch.tensor(drawn)


def _trained(here: Here, network: Any) -> Report:
    module, data = Denoising(network), Batches(here, _samples())
    trainer = here.trainer(max_epochs=1)
    trainer.fit(module, datamodule=data)
    predicted = torch.cat(trainer.predict(module, datamodule=data))
    module.network.save_pretrained(here.folder / "trained")
    module.average.save_pretrained(here.folder / "average")
    loaded = type(network).from_pretrained(here.folder / "trained")
    average = type(network).from_pretrained(here.folder / "average")
    return {
        "weights": weights(module),
        "logged": logged(trainer),
        "average": weights(average),
        "predicted": predicted,
        "loaded": weights(loaded),
    }


CALLS = "`EMAModel`; `save_pretrained` and `from_pretrained` of both"


@use(
    "diffusers",
    "UNet2DModel with EMAModel",
    f"{CALLS}; `DDPMPipeline`",
    refused=by("pipeline_parallel", "several lists of repeated blocks"),
)
def unet(here: Here) -> Report:
    from diffusers import UNet2DModel

    torch.manual_seed(5)
    network = UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=4,
    )
    report = _trained(here, network)
    return report | {"drawn": _drawn(UNet2DModel.from_pretrained(here.folder / "average"))}


@use("diffusers", "Transformer2DModel with EMAModel", CALLS)
def transformer(here: Here) -> Report:
    from diffusers import Transformer2DModel

    torch.manual_seed(5)
    network = Transformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=3, num_layers=4, norm_num_groups=3
    )
    return _trained(here, network)
