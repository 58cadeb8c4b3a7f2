"""A logger whose methods are not decorated with `rank_zero_only` is told each thing once."""

from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers.logger import Logger
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_shard.environments.launchers.processes import ProcessLauncher
from lightning_shard.environments.launchers.replicas import told_once
from tests.examples.commands import ignoring_advice
from tests.trainers import cpu_trainer

pytestmark = ignoring_advice(".*microbatches are fewer")


class Rows(Logger):
    """Written for one device."""

    name = version = "rows"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, sorted(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        self.rows.append("hyperparams")

    def log_graph(self, *args: Any, **kwargs: Any) -> None:
        self.rows.append("graph")

    def save(self) -> None:
        """Called after every row."""

    def finalize(self, status: str) -> None:
        self.rows.append(status)


class Model(BoringModel):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss["loss"])
        return loss


def rows_of(strategy: str, devices: int) -> list[Any]:
    logger = Rows()
    trainer = cpu_trainer(
        strategy=strategy,
        devices=devices,
        logger=[logger],
        max_steps=3,
        log_every_n_steps=1,
        limit_val_batches=0,
    )
    trainer.fit(Model())
    assert not set(vars(logger)) & {"log_metrics", "save", "finalize"}  # as it was
    return logger.rows


@pytest.mark.parametrize(
    "strategy", ["zero2", "zero3", "shard_ddp", "local_sgd", "async_sgd", "elastic"]
)
def test_a_logger_gets_each_row_once(strategy: str) -> None:
    """A logger got each row once for each rank."""
    rows = rows_of(f"{strategy}_in_process", 2)
    steps = [row for row in rows if isinstance(row, tuple)]
    assert steps == [(step, ["epoch", "loss"]) for step in range(3)]
    assert rows.count("success") == rows.count("hyperparams") == rows.count("graph") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_of_another_rank_tells_its_logger_nothing(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = Rows()
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=logger, enable_checkpointing=False)
    monkeypatch.setattr(rank_zero_only, "rank", rank, raising=False)
    launcher = ProcessLauncher(LightningEnvironment(), num_processes=1, num_nodes=1)
    launcher.launch(lambda: logger.log_metrics({"loss": 1.0}, 0), trainer=trainer)
    assert logger.rows == ([(0, ["loss"])] if rank == 0 else [])


def test_a_mock_is_given_back_as_it_was() -> None:
    logger = Mock(spec=Logger)
    method = logger.log_metrics
    trainer = Mock(loggers=[logger])
    with told_once(trainer):
        logger.log_metrics({"loss": 1.0})
    assert logger.log_metrics is method
    method.assert_called_once_with({"loss": 1.0})


def test_no_trainer_has_no_loggers() -> None:
    with told_once(None):
        pass
