"""What Fabric has saved, a Trainer resumes from; and the reverse."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard.fabric import trainer_checkpoint
from tests.fabric.loops import fabric_of, strategy_of
from tests.fabric.nets import Net, adam, assert_close
from tests.strategies.parity import STRATEGIES, ignoring, quiet_trainer

pytestmark = ignoring()
each_format = pytest.mark.parametrize("kind", ["full", "sharded"])
BATCHES, STEPS, SAVED = 4, 10, 6  # of an epoch, of the run, and where it is saved: amid an epoch


class Module(L.LightningModule):
    """Trains a `Net`; notes the losses."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = Net() if net is None else net
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = adam(self.net)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def data() -> DataLoader:
    samples = torch.randn(4 * BATCHES, 4, generator=torch.Generator().manual_seed(9))
    return DataLoader(TensorDataset(samples), batch_size=2, shuffle=True)


def fit(
    strategy: Any, steps: int, path: Path | None = None, save: Path | None = None
) -> list[float]:
    module = Module()
    options: dict[str, Any] = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    trainer = quiet_trainer(strategy=strategy, devices=2, max_steps=steps, **options)
    trainer.fit(module, data(), ckpt_path=path, weights_only=False)
    if save is not None:
        trainer.save_checkpoint(save)
    return module.losses


def loop(fabric: Fabric, steps: int, path: Path | None, save: Path | None) -> list[float]:
    """Train a net by hand from a checkpoint on, and save one, as `fit` does."""
    net = Net()
    optimizer = adam(net)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer = fabric.setup(net, optimizer)
    loader = fabric.setup_dataloaders(data())
    state = trainer_checkpoint({"net": model}, optimizer, schedule)
    if path is not None:
        fabric.load(path, state, weights_only=False)
    losses, done = [], state["global_step"]
    for epoch in range(3):  # Fabric tells the sampler the epoch by counting
        for number, batch in enumerate(loader):
            if epoch * BATCHES + number < done or done == steps:
                continue
            loss = model(batch[0]).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(fabric.all_gather(loss.detach()).mean().item())
            done += 1
    if save is not None:
        place = {"global_step": done, "epoch": done // BATCHES, "batch": done % BATCHES}
        fabric.save(save, trainer_checkpoint({"net": model}, optimizer, schedule, **place))
    return losses


def by_hand(strategy: Any, steps: int, path: Path | None = None, save: Path | None = None) -> Any:
    return fabric_of(strategy).launch(loop, steps, path, save)


@pytest.fixture
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")  # of the samplers, restored after the test


@pytest.mark.few_cases(1)
@pytest.mark.usefixtures("seed")
@each_format
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_save_of_fabric_resumes_under_the_trainer(
    strategy: str, kind: str, tmp_path: Path
) -> None:
    straight = fit(f"{strategy}_in_process", STEPS)
    first = by_hand(strategy_of(strategy, checkpoint_format=kind), SAVED, save=tmp_path / "saved")
    rest = fit(f"{strategy}_in_process", STEPS, path=tmp_path / "saved")
    assert_close([*first, *rest], straight)


@pytest.mark.few_cases(1)
@pytest.mark.usefixtures("seed")
@each_format
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_save_of_the_trainer_resumes_under_fabric(
    strategy: str, kind: str, tmp_path: Path
) -> None:
    from lightning_shard import ZeRO2Strategy

    saving = ZeRO2Strategy(backend="in_process", checkpoint_format=kind)
    first = fit(saving, SAVED, save=tmp_path / "saved")
    rest = by_hand(strategy_of(strategy), STEPS, path=tmp_path / "saved")
    assert_close([*first, *rest], fit("zero2_in_process", STEPS))
