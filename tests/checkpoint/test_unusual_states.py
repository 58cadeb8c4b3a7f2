"""Runs with unusual parameters and options of optimizers resume from either format."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_shard import ZeRO3Strategy
from tests.strategies.parity import fit_alike, ignoring

pytestmark = ignoring("You're resuming from a checkpoint that ended before")
WIDTH = 6


class Unusual(L.LightningModule):
    """Has parameters of integers, of complex numbers and of no element."""

    def __init__(self, lr: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.lr = lr()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.whole = nn.Parameter(torch.arange(WIDTH), requires_grad=False)
        self.complex = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.empty(0))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = (self.first(batch[0]) * self.whole * self.complex).abs() + self.empty.sum()
        return F.mse_loss(self.last(hidden), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fitted(strategy: Any, num_steps: int, lr: Callable[[], Any], **options: Any) -> L.Trainer:
    return fit_alike(Unusual(lr), strategy, num_steps, 16, **options)


@pytest.mark.parametrize("lr", [lambda: 0.01, lambda: torch.tensor(0.01)], ids=["number", "tensor"])
@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
def test_rates_in_tensors_and_frozen_integers_resume(
    checkpoint_format: Any, lr: Callable[[], Any], tmp_path: Path
) -> None:
    """Rates in tensors and frozen integers did not resume."""

    def strategy() -> ZeRO3Strategy:
        return ZeRO3Strategy(backend="in_process", num_ranks=2, checkpoint_format=checkpoint_format)

    path = tmp_path / "two.ckpt"
    fitted(strategy(), 2, lr).save_checkpoint(path)
    resumed = fitted(strategy(), 4, lr, ckpt_path=path, weights_only=False)
    expected = fitted("auto", 4, lr).lightning_module.state_dict()
    for name, value in resumed.lightning_module.state_dict().items():
        torch.testing.assert_close(value, expected[name], msg=lambda m, name=name: f"{name}: {m}")
