"""Tensor parallel by name, by class, and from YAML."""

from pathlib import Path
from typing import Any, NoReturn

import lightning as L  # noqa: N812
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn

import lightning_shard
from lightning_shard import (
    ConfigError,
    HybridParallelStrategy,
    ParallelMesh,
    TensorParallelStrategy,
)
from lightning_shard.strategies.dimensions import tensor
from tests.examples.commands import set_arguments
from tests.strategies.parity import GlobalBatches, build, ignoring, quiet_trainer
from tests.strategies.stacks import WIDTH, Stack, fit
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS
from tests.trainers import SILENT

pytestmark = ignoring()


@pytest.mark.parametrize("backend", ["", "_in_process", "_gloo", "_mpi", "_nccl"])
def test_the_names_are_registered(backend: str) -> None:
    assert f"tensor_parallel{backend}" in StrategyRegistry.available_strategies()
    strategy = StrategyRegistry.get(f"tensor_parallel{backend}")
    assert type(strategy) is TensorParallelStrategy
    assert "TensorParallelStrategy" in lightning_shard.__all__


class Watched(L.LightningModule):
    """Four wide layers, and what the strategy made of them."""

    seen: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        strategy = self.trainer.strategy
        up = tuple(self.up._parameters["weight"].shape)  # its `weight` looks full in a step
        self.seen.update(mesh=strategy.mesh, up=up, stage=strategy.stage)
        return self.down(torch.relu(self.up(batch[0]))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        data = torch.utils.data.TensorDataset(torch.ones(16, 8))
        return torch.utils.data.DataLoader(data, batch_size=2)


def test_a_yaml_file_configures_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init_args = {
        "backend": "in_process",
        "num_ranks": 4,
        "tensor_parallel_size": 2,
        "plan": {"up": "colwise", "down": "rowwise"},
        "zero_stage": 1,
    }
    strategy = {"class_path": "lightning_shard.TensorParallelStrategy", "init_args": init_args}
    trainer = {"accelerator": "cpu", "devices": 1, "max_steps": 2, "strategy": strategy, **SILENT}
    (tmp_path / "split.yaml").write_text(yaml.safe_dump({"seed_everything": 0, "trainer": trainer}))
    monkeypatch.chdir(tmp_path)
    set_arguments(monkeypatch, "train.py", "fit", "--config=split.yaml")
    LightningCLI(Watched)
    assert Watched.seen == {"mesh": ParallelMesh(dp=2, tp=2), "up": (8, 8), "stage": 1}


def test_a_size_that_does_not_divide_the_world_is_refused() -> None:
    model = build("gpt")
    strategy = TensorParallelStrategy(
        backend="in_process", tensor_parallel_size=2, plan=PLANS["gpt"]
    )
    with pytest.raises(ConfigError, match="3 ranks cannot be split into groups of pp=1 times tp=2"):
        quiet_trainer(strategy=strategy, devices=3).fit(model, datamodule=GlobalBatches(model))


def test_a_stage_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="zero_stage must be a whole number from 0 to 3"):
        TensorParallelStrategy(zero_stage=4)


def test_a_group_of_one_rank_is_data_parallel_alone() -> None:
    model = build("gpt")
    strategy = TensorParallelStrategy(
        backend="in_process", tensor_parallel_size=1, plan=PLANS["gpt"]
    )
    quiet_trainer(strategy=strategy, devices=2, max_steps=1).fit(
        model, datamodule=GlobalBatches(model, 1)
    )
    assert not [m for m in model.modules() if type(m).__name__.startswith(("Colwise", "Rowwise"))]


class Scale(nn.Module):
    """Nothing that a plan could split."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


class Scales(Stack):
    block = Scale

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = Scale(), Scale()

    def loss(self, batch: Any) -> Tensor:
        return self(batch[0].repeat(1, 2)).square().mean()


@pytest.mark.parametrize(
    "strategy",
    [
        TensorParallelStrategy(backend="in_process", num_ranks=2, tensor_parallel_size=1),
        HybridParallelStrategy(backend="in_process", num_ranks=2, pipeline_parallel_size=2),
    ],
)
def test_one_rank_needs_no_layers_to_split(
    strategy: TensorParallelStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank had to have layers to split."""

    def refuse(*_: Any) -> NoReturn:
        raise ConfigError("Nothing can be split.")

    monkeypatch.setattr(tensor, "automatic_plan", refuse)
    alone, fitted = fit(Scales, max_epochs=1), fit(Scales, strategy, max_epochs=1)
    torch.testing.assert_close(fitted.weights, alone.weights, rtol=1e-5, atol=1e-6)
