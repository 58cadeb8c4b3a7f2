"""Modules of TorchScript within a model train, are saved and resume as on one device."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightning_shard import ConfigError
from tests.strategies.parity import fit_alike, ignoring

pytestmark = ignoring("`torch.jit:DeprecationWarning", "`torch.jit:FutureWarning")
WIDTH, NUM_SAMPLES = 6, 32
SCHEMES = ("shard_ddp", "zero1", "zero2", "zero3")


class OfTorchScript(L.LightningModule):
    """Has a scripted and a traced part, scripted blocks, and a block that has a scripted part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
        self.traced = torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.zeros(2, WIDTH))
        self.scripted = nn.ModuleList(torch.jit.script(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(nn.Linear(WIDTH, WIDTH)))
            for _ in range(2)
        )
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.traced(self.first(x))
        for block in (*self.scripted, *self.blocks):
            x = torch.tanh(block(x))
        return self.last(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fitted(strategy: str, num_steps: int, **options: Any) -> L.Trainer:
    made = strategy if strategy == "auto" else f"{strategy}_in_process"
    return fit_alike(OfTorchScript(), made, num_steps, NUM_SAMPLES, **options)


def assert_same(got: L.Trainer, expected: L.Trainer) -> None:
    values = got.lightning_module.state_dict()
    for name, value in expected.lightning_module.state_dict().items():
        torch.testing.assert_close(values[name], value, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.few_cases(1)
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_module_with_parts_of_torchscript_trains(scheme: str, tmp_path: Path) -> None:
    """A module with parts of TorchScript did not train."""
    expected = fitted("auto", 4)
    assert_same(fitted(scheme, 4), expected)
    path = tmp_path / "two.ckpt"
    fitted(scheme, 2).save_checkpoint(path)
    assert_same(fitted(scheme, 4, ckpt_path=path), expected)


@pytest.mark.parametrize("scheme", ["tensor_parallel", "pipeline_parallel"])
def test_a_module_of_torchscript_is_refused_by_name_where_it_would_have_to_change(
    scheme: str,
) -> None:
    with pytest.raises(ConfigError, match="'first' is a module of TorchScript"):
        fitted(scheme, 1)
