"""The digits, contrastive and GAN examples come to what they should."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_shard  # noqa: F401  the import registers the names of the strategies
from examples.train_gan import GAN
from tests.examples.commands import ignoring_advice, run_example
from tests.trainers import cpu_trainer

pytestmark = ignoring_advice()


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage",
    [
        pytest.param("shard_ddp", marks=pytest.mark.slow),
        pytest.param("zero1", marks=pytest.mark.slow),
        pytest.param("zero2", marks=pytest.mark.slow),
        "zero3",
    ],
)
def test_more_than_95_percent_of_the_test_images_are_read_right(
    stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = f"--trainer.strategy={stage}_in_process"
    run_example(monkeypatch, "train_digits", strategy, "--trainer.devices=2")
    row = next(r for r in capsys.readouterr().out.splitlines() if "test_accuracy" in r)
    assert float(row.split()[-2]) > 0.95


def loss_after_an_epoch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> float:
    run_example(monkeypatch, "contrastive", "--trainer.max_epochs=1", *arguments)
    return float(capsys.readouterr().out.split("train loss")[-1])


@pytest.mark.parametrize(
    "stage",
    ["zero3", *(pytest.param(s, marks=pytest.mark.slow) for s in ("shard_ddp", "zero1", "zero2"))],
)
def test_the_encoder_learns_which_views_are_of_one_image(
    stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = f"--trainer.strategy={stage}_in_process"
    loss = loss_after_an_epoch(monkeypatch, capsys, strategy, "--trainer.devices=2")
    assert loss < 2.5  # by chance log(64) = 4.2: both ranks' 32 images are told apart


NUM_RANKS, OWN, NUM_STEPS = 2, 4, 6


class OnBoth(GAN):
    """Draws on one device the noise of two ranks, and has images in the order of the ranks."""

    def noise_like(self, images: torch.Tensor) -> torch.Tensor:
        if self.trainer.world_size > 1:
            return GAN.noise_like(self, images)
        generator = torch.Generator().manual_seed(self.global_step)
        noise = torch.randn(NUM_RANKS, OWN, self.hparams["noise_size"], generator=generator)
        return noise.flatten(0, 1).to(images)

    def val_dataloader(self) -> DataLoader:
        return self.train_dataloader()

    def train_dataloader(self) -> DataLoader:
        size = OWN * NUM_RANKS
        images = torch.rand(NUM_STEPS, size, 64, generator=torch.Generator().manual_seed(1))
        own = images.chunk(self.trainer.world_size, dim=1)[self.global_rank]
        return DataLoader(TensorDataset(own.flatten(0, 1)), batch_size=own.shape[1])


def trained(strategy: str, devices: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = OnBoth(width=16)
    trainer = cpu_trainer(
        strategy=strategy,
        devices=devices,
        max_epochs=1,
        precision="64-true",
        use_distributed_sampler=False,
    )
    trainer.fit(model)
    assert trainer.global_step == 2 * NUM_STEPS
    return model.state_dict()


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("scheme", ["shard_ddp", "zero1", "zero2", "zero3"])
def test_both_networks_are_one_devices(scheme: str) -> None:
    one, ranks = trained("auto", 1), trained(f"{scheme}_in_process", NUM_RANKS)
    for name, expected in one.items():
        torch.testing.assert_close(ranks[name], expected, rtol=1e-9, atol=1e-12, msg=name)


def test_the_example_runs_as_its_docstring_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--trainer.strategy=zero3_in_process", "--trainer.devices=2"]
    run_example(monkeypatch, "train_gan", *options, "--trainer.max_epochs=1")
    *_, discriminator, generator = capsys.readouterr().out.splitlines()
    assert 0.1 < float(discriminator.removeprefix("discriminator loss ")) < 2
    assert 0.1 < float(generator.removeprefix("generator loss ")) < 4
