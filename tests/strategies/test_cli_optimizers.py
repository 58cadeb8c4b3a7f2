"""Every way in which LightningCLI configures optimizers, on ranks of this process."""

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch.cli import (
    LightningArgumentParser,
    LightningCLI,
    LRSchedulerCallable,
    OptimizerCallable,
)
from torch import Tensor

from tests.strategies.parity import ignoring
from tests.strategies.stacks import Stack

pytestmark = ignoring(".*configure_optimizers` will be overridden by", ".*fewer than the")


class WithoutOptimizer(Stack):
    """Leaves the optimizer to the command line."""

    configure_optimizers = L.LightningModule.configure_optimizers

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss


class WithCallables(WithoutOptimizer):
    """Takes functions that make its optimizer and schedule."""

    def __init__(
        self,
        optimizer: OptimizerCallable = torch.optim.SGD,
        scheduler: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR,
    ) -> None:
        super().__init__()
        self.optimizer, self.scheduler = optimizer, scheduler

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}


class Nested(LightningCLI):
    """Has names of its own for the options, and says what becomes of them."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_optimizer_args(torch.optim.Adam, nested_key="own")
        parser.add_lr_scheduler_args(torch.optim.lr_scheduler.StepLR, nested_key="schedule")

    @staticmethod
    def configure_optimizers(
        lightning_module: L.LightningModule, optimizer: Any, lr_scheduler: Any = None
    ) -> Any:
        scheduler = {"scheduler": lr_scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class OfInstance(LightningCLI):
    """Configures by a method of its own."""

    def configure_optimizers(  # type: ignore[override]
        self, lightning_module: L.LightningModule, optimizer: Any, lr_scheduler: Any = None
    ) -> Any:
        assert optimizer.param_groups[0]["params"][0] is next(lightning_module.parameters())
        return optimizer


STEP = ["--lr_scheduler=torch.optim.lr_scheduler.StepLR", "--lr_scheduler.step_size=1"]
CALLABLE = ["--model.optimizer=torch.optim.Adam", "--model.optimizer.lr=0.01"]
WAYS: dict[str, tuple[type[Stack], type[LightningCLI], list[str]]] = {
    "short name": (WithoutOptimizer, LightningCLI, ["--optimizer=Adam", "--optimizer.lr=0.01"]),
    "import path": (WithoutOptimizer, LightningCLI, ["--optimizer=torch.optim.Adam"]),
    "scheduler": (WithoutOptimizer, LightningCLI, ["--optimizer=AdamW", *STEP]),
    "plateau": (
        WithoutOptimizer,
        LightningCLI,
        ["--optimizer=AdamW", "--lr_scheduler=ReduceLROnPlateau", "--lr_scheduler.monitor=loss"],
    ),
    "nested": (WithoutOptimizer, Nested, ["--own.lr=0.02", "--schedule.step_size=2"]),
    "method": (WithoutOptimizer, OfInstance, ["--optimizer=Adam"]),
    "instead of the model's": (Stack, LightningCLI, ["--optimizer=torch.optim.Adam"]),
    "callables": (WithCallables, LightningCLI, CALLABLE),
    "yaml": (WithoutOptimizer, LightningCLI, []),
}
YAML = """
optimizer:
  class_path: torch.optim.Adam
  init_args: {lr: 0.01}
lr_scheduler:
  class_path: torch.optim.lr_scheduler.ExponentialLR
  init_args: {gamma: 0.5}
"""
HYBRID = [
    "--trainer.strategy=lightning_shard.HybridParallelStrategy",
    "--trainer.strategy.backend=in_process",
    "--trainer.strategy.num_ranks=4",
    "--trainer.strategy.pipeline_parallel_size=2",
]
RANKS = {
    "zero2": ["--trainer.strategy=zero2_in_process", "--trainer.devices=2"],
    "zero3": ["--trainer.strategy=zero3_in_process", "--trainer.devices=2"],
    "hybrid": HYBRID,
}
QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


def fit(way: str, ranks: list[str], folder: Path) -> dict[str, Tensor]:
    model, kind, options = WAYS[way]
    (folder / "own.yaml").write_text(YAML)
    torch.manual_seed(0)
    # The data are the same on all ranks, so that one device has as many steps.
    common = ["fit", "--trainer.accelerator=cpu", "--trainer.max_epochs=2", "--seed_everything=3"]
    common += ["--trainer.use_distributed_sampler=false"]
    common += [f"--trainer.{name}=false" for name in QUIET]
    common += ["--config", str(folder / "own.yaml")] if way == "yaml" else []
    # Lightning 2.6 calls methods that jsonargparse 4.49 deprecated.
    quiet = patch.dict("os.environ", {"JSONARGPARSE_DEPRECATION_WARNINGS": "off"})
    with quiet, patch("sys.argv", ["lightning-shard"]):  # there are no arguments beside these
        cli = kind(model, args=[*common, *ranks, *options], save_config_callback=None)
    return {name: value.clone() for name, value in cli.model.state_dict().items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda way: fit(way, [], tmp_path_factory.mktemp("alone")))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", RANKS)
def test_equals_one_device(way: str, ranks: str, alone: Any, tmp_path: Path) -> None:
    got = fit(way, RANKS[ranks], tmp_path)
    torch.testing.assert_close(got, alone(way), rtol=1e-5, atol=1e-6)
