"""One rank of a strategy has everything, and does what the plain Trainer does."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS
from torch.utils.data import DataLoader

from lightning_shard import ZeRO1Strategy, ZeRO2Strategy, ZeRO3Strategy
from tests.optim.foreign_optimizers import DAdaptation, Prodigy
from tests.strategies.parity import ignoring, quiet_trainer

pytestmark = ignoring()

STAGES: dict[str, Any] = {"zero1": ZeRO1Strategy, "zero2": ZeRO2Strategy, "zero3": ZeRO3Strategy}
OPTIMIZERS: dict[str, Any] = {
    "LBFGS": lambda params: LBFGS(params, 0.1, max_iter=3),
    "Prodigy": Prodigy,
    "DAdaptation": DAdaptation,
}


class Net(pl.LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        self.optimizer = optimizer

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


def fit(optimizer: str, strategy: Any, epochs: int, path: Path | None = None) -> Any:
    data = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    module = Net(optimizer)
    trainer = quiet_trainer(
        strategy=strategy, devices=1, max_epochs=epochs, max_steps=-1, accumulate_grad_batches=1,
        gradient_clip_val=None,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=path)
    return trainer, [param.detach() for param in module.parameters()]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_that_looks_at_all_parameters_was_refused_on_one_rank(
    optimizer: str, stage: str, tmp_path: Path
) -> None:
    """It was tried on two shards of a parameter, of which one rank has all."""
    _, expected = fit(optimizer, "auto", 2)
    for format_ in ("full", "sharded"):

        def make(format_: str = format_) -> Any:
            return STAGES[stage](backend="in_process", checkpoint_format=format_)

        trainer, _ = fit(optimizer, make(), 1)
        trainer.save_checkpoint(tmp_path / f"{format_}.ckpt")
        _, weights = fit(optimizer, make(), 2, tmp_path / f"{format_}.ckpt")
        torch.testing.assert_close(weights, expected)
