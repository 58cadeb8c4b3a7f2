"""Tensor parallel on real processes over Gloo, which start with different weights."""

import os
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from lightning_shard import TensorParallelStrategy
from tests.processes import run_processes
from tests.strategies.models import MODELS
from tests.strategies.parity import (
    Case,
    Run,
    assert_parity,
    ignore_upstream_warnings,
    ignoring,
    single_device,
    train,
)
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS
from tests.trainers import cpu_trainer

pytestmark = ignoring()


def train_over_gloo() -> Run:
    """Run in each of two processes."""
    ignore_upstream_warnings()
    torch.manual_seed(7 + int(os.environ["RANK"]))
    strategy = TensorParallelStrategy(backend="gloo", tensor_parallel_size=2, plan=PLANS["gpt"])
    return train(MODELS["gpt"](), strategy=strategy, devices=2)


@pytest.mark.slow
def test_ranks_take_the_weights_of_the_first() -> None:
    runs: list[Run] = run_processes(train_over_gloo, 2)
    expected = single_device(Case(model="gpt", strategy="", num_ranks=1))
    for run in runs:
        assert_parity(run, expected)


class Dice(L.LightningModule):
    """Draws numbers in its steps, and stops early."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(2, 4), torch.nn.Linear(4, 2)
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.drawn.append(float(torch.rand(())))
        loss = self.down(self.up(batch[0])).square().mean()
        self.log("drawn", self.drawn[-1])  # another one on each rank, were it not for one stream
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def draw_over_gloo() -> tuple[list[float], int]:
    """Run in each of two processes."""
    ignore_upstream_warnings()
    torch.manual_seed(int(os.environ["RANK"]))
    model = Dice()
    strategy = TensorParallelStrategy(backend="gloo", plan={"up": "colwise", "down": "rowwise"})
    trainer = cpu_trainer(
        devices=2,
        strategy=strategy,
        max_epochs=5,
        callbacks=[EarlyStopping("drawn", patience=0, min_delta=10.0)],
    )
    data = torch.utils.data.TensorDataset(torch.ones(8, 2))
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
    return model.drawn, trainer.current_epoch


def test_a_group_draws_the_same_numbers_and_stops_together() -> None:
    """With one data-parallel rank, Lightning counted one vote and expected two: none stopped."""
    (drawn, epochs), other = run_processes(draw_over_gloo, 2)
    assert (drawn, epochs) == other
    assert epochs == 2
