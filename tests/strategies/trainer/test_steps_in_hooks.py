"""A hook that runs training steps of its own, as the learning-rate finder does."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.features.columns import COLUMNS, ONE_DEVICE, Column, Here
from tests.features.network import Report, fitted
from tests.strategies.parity import ignoring

pytestmark = ignoring()

AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "alone": nullcontext,
    "another mode": lambda: torch.device("cpu"),
}


class Trains(Callback):
    """Takes two steps, validates one batch, and notes what the weights are in between."""

    def __init__(self, around: Callable[[], AbstractContextManager[Any]]) -> None:
        self.around = around
        self.norms: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        batch = next(iter(trainer.datamodule.train_dataloader()))
        optimizer = pl_module.optimizers(use_pl_optimizer=False)
        with self.around():
            for _ in range(2):
                optimizer.zero_grad()
                self.step(trainer, optimizer, batch)
                self.norms.append(sum(param.norm().item() for param in pl_module.parameters()))

    def step(self, trainer: L.Trainer, optimizer: Any, batch: Any) -> None:
        loss = trainer.strategy.training_step(batch, 0)
        trainer.strategy.backward(loss, None)
        trainer.strategy.optimizer_step(optimizer, closure=lambda: loss)


def trained(column: Column, around: str, folder: Path) -> Report:
    trains = Trains(AROUND[around])
    report = fitted(Here(column, folder), callbacks=[trains], max_steps=2, limit_val_batches=0)
    return report | {"norms": trains.norms}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", ["zero3", "tensor_parallel", "pipeline_parallel"])
def test_steps_of_a_hook_met_full_weights(name: str, around: str, tmp_path: Path) -> None:
    got = trained(COLUMNS[name], around, tmp_path)
    expected = trained(ONE_DEVICE, around, tmp_path)
    torch.testing.assert_close(got["weights"], expected["weights"], rtol=1e-5, atol=1e-7)
    assert got["norms"] == pytest.approx(expected["norms"], rel=1e-5)
