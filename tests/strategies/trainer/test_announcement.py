"""One line at the start of a fit says what runs and what each rank will hold."""

import re
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_shard
from lightning_shard.data_parallel.held_bytes import HeldBytes
from lightning_shard.strategies.trainer.announcement import announcement
from tests.examples.commands import ignoring_advice
from tests.trainers import SILENT

pytestmark = ignoring_advice(".*microbatches are fewer", ".*is not covered")
NAMES = (
    "shard_ddp",
    "zero1",
    "zero2",
    "zero3",
    "tensor_parallel",
    "pipeline_parallel",
    "hybrid_parallel",
    "local_sgd",
    "async_sgd",
    "elastic",
)
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20}


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> None:
    """Programs whose `main` other tests call here have turned messages off for the process."""
    caplog.set_level("INFO", "lightning.pytorch.utilities.rank_zero")
    caplog.set_level("INFO", "pytorch_lightning.utilities.rank_zero")


class Mine(torch.optim.SGD):
    pass


class Model(L.LightningModule):
    def __init__(self, optimizer: str = "adamw", widths: tuple[int, ...] = (64,) * 4) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, w), nn.ReLU(), nn.Linear(w, 32)) for w in widths]
        self.net = nn.Sequential(*blocks)
        self.optimizer = optimizer
        self.held: list[HeldBytes] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        strategy: Any = self.trainer.strategy
        self.mine = strategy.held_bytes()

    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        self.held = strategy.collectives.all_gather_object(self.mine)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters())
        kind = torch.optim.SGD if self.optimizer == "sgd" else Mine
        return kind(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.ones(64, 32)), batch_size=4)


def trainer_of(strategy: Any, **options: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "strategy": strategy,
        "devices": 2,
        "max_steps": 3,
        **SILENT,
    }
    return L.Trainer(**(defaults | options))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "each rank will hold" in record.message]


def sizes(line: str) -> list[float]:
    """Return the total, parameters, gradients and optimizer state that a line tells."""
    found = re.findall(r"([\d.]+) (B|KiB|MiB)\b", line)
    return [float(number) * UNITS[unit] for number, unit in found]


def check(line: str, held: list[HeldBytes]) -> None:
    for one in held:
        counted = [one.total, one.parameters, one.gradients, one.optimizer_state]
        assert sizes(line) == pytest.approx(counted, rel=0.01)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("name", NAMES)
def test_the_line_tells_the_bytes_that_are_counted_later(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    trainer_of(f"{name}_in_process").fit(model)
    (line,) = lines(caplog)
    assert line.startswith(f"{name} on 2 ranks (in_process, threads of this process): 16,768 ")
    assert len(model.held) == 2
    check(line, model.held)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("zero2", {"precision": "bf16-mixed"}),
        ("zero3", {"precision": "bf16-true"}),
        ("zero3", {"precision": "64-true"}),
        ("shard_ddp", {"precision": "bf16-mixed"}),
    ],
)
def test_other_formats_and_optimizers(
    name: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = Model("sgd")
    trainer_of(f"{name}_in_process", **options).fit(model)
    (line,) = lines(caplog)
    check(line, model.held)


def test_stages_of_a_pipeline_that_differ_are_told_as_a_range(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = lightning_shard.PipelineParallelStrategy(backend="in_process", split=[2])
    model = Model(widths=(16, 16, 64, 64))
    trainer_of(strategy).fit(model)
    (line,) = lines(caplog)
    totals = [one.total for one in model.held]
    assert sizes(line)[:2] == pytest.approx([min(totals), max(totals)], rel=0.01)


def test_an_optimizer_of_ones_own_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    trainer_of("zero2_in_process").fit(Model("mine"))
    (line,) = lines(caplog)
    assert line.endswith("optimizer state 0 B; not counted: the state of Mine")


def test_it_comes_once_for_each_fit_and_not_at_all_on_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for kind in (lightning_shard.ZeRO2Strategy, lightning_shard.HybridParallelStrategy):
        strategy = kind(backend="in_process", announce=False)
        trainer_of(strategy).fit(Model())
    assert lines(caplog) == []
    model, trainer = Model(), trainer_of("zero3_in_process")
    trainer.fit(model)
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 5, 5
    trainer.fit(model)
    assert len(lines(caplog)) == 2


def test_what_the_line_looks_like() -> None:
    held = HeldBytes(parameters=2**20, gradients=2**20, optimizer_state=2**21)
    assert announcement("zero3 on 4 ranks", "nccl, started by torchrun", 1_048_576, [held]) == (
        "zero3 on 4 ranks (nccl, started by torchrun): 1,048,576 parameters; each rank will hold "
        "4.00 MiB: parameters 1.00 MiB, gradients 1.00 MiB, optimizer state 2.00 MiB"
    )
    buckets = "buckets of 16 MB (measured: 0.12 ms, 1.9 GB/s)"
    line = announcement("zero3 on 4 ranks", "nccl", 1, [held], ["what is kept"], buckets)
    assert line.endswith(f"2.00 MiB; not counted: what is kept; {buckets}")
