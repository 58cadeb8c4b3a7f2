"""What is reported, when, and with which checkpoint; Ray's context is a fake, ranks are threads."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_shard import ZeRO2Strategy
from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import ConfigError
from lightning_shard.ray import RayReportCallback, _in_turns
from lightning_shard.testing import run_ranks
from tests.ray.fake import FakeWorker
from tests.ray.workers import Net, samples
from tests.trainers import cpu_trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


def fit(callback: RayReportCallback, checkpoint_format: str = "sharded", **flags: Any) -> L.Trainer:
    """Train on two ranks for epochs of four steps."""
    strategy = ZeRO2Strategy(backend="in_process", checkpoint_format=checkpoint_format)
    flags = {"enable_checkpointing": True} | flags
    trainer = cpu_trainer(strategy=strategy, devices=2, callbacks=[callback], **flags)
    trainer.fit(Net(), DataLoader(samples(32), batch_size=4))
    return trainer


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [4, 8]),
        ({"every_n_epochs": 2}, [8]),
        ({"every_n_train_steps": 3}, [3, 4, 6, 8]),
        ({"every_n_train_steps": 4}, [4, 8]),  # once where both are due
        ({"every_n_train_steps": 4, "every_n_epochs": 0}, [4, 8]),
    ],
)
def test_when_reports_are_made(
    options: dict[str, int], steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = FakeWorker(folder=tmp_path).install(monkeypatch)
    fit(RayReportCallback(save=False, **options), max_epochs=2)
    assert [metrics["step"] for metrics, _, _ in worker.reports] == steps
    assert all(checkpoint is None for _, checkpoint, _ in worker.reports)


@pytest.mark.parametrize("checkpoint_format", ["sharded", "full"])
def test_a_reported_checkpoint_lies_in_the_runs_folder_and_is_resumed(
    checkpoint_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = FakeWorker(folder=tmp_path).install(monkeypatch)
    trainer = fit(RayReportCallback(), checkpoint_format, max_epochs=1)
    [(metrics, checkpoint, options)] = worker.reports
    assert metrics.keys() == {"loss", "epoch", "step"}
    assert (metrics["epoch"], metrics["step"]) == (0, 4)
    assert options == {"checkpoint_upload_mode": "no upload"}
    path = Path(checkpoint.path)
    assert path.parent == tmp_path / "run"
    assert (path / "checkpoint.ckpt").is_dir() == (checkpoint_format == "sharded")
    assert [type(one).__name__ for one in trainer.checkpoint_callbacks] == ["RayReportCallback"]
    again = cpu_trainer(strategy="zero3_in_process", devices=2, max_epochs=2)
    loader = DataLoader(samples(32), batch_size=4)
    again.fit(Net(), loader, ckpt_path=path / "checkpoint.ckpt", weights_only=False)
    assert again.global_step == 8


def test_storage_that_is_not_mounted_gets_a_copy_of_what_rank_0_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = FakeWorker(folder=tmp_path, filesystem="s3").install(monkeypatch)
    fit(RayReportCallback(), "full", max_epochs=1)
    [(_, checkpoint, options)] = worker.reports
    assert options["checkpoint_dir_name"].startswith("checkpoint_step=4-")
    assert not Path(checkpoint.path).exists()  # Ray has copied it


def test_storage_that_is_not_mounted_refuses_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeWorker(folder=tmp_path, filesystem="s3").install(monkeypatch)
    with pytest.raises(ConfigError, match="expected a filesystem that every node mounts"):
        fit(RayReportCallback(), max_epochs=1)


def _batches(rank: int) -> list[Any]:
    own = iter([f"{rank}{letter}" for letter in "abc"])
    return list(_in_turns(own, Collectives(dist.group.WORLD)))


def test_ranks_of_a_model_take_turns_with_their_shards() -> None:
    batches = ["0a", "1a", "2a", "0b", "1b", "2b", "0c", "1c", "2c"]
    assert run_ranks(_batches, 3) == [batches] * 3
