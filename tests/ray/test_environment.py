"""Who is who among Ray Train's workers, and where they meet; Ray's context is a fake here."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L  # noqa: N812
import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lightning_shard.environments import fitting_environment
from lightning_shard.environments.ray import RayEnvironment
from lightning_shard.environments.started_elsewhere import InProcessEnvironment
from lightning_shard.errors import BackendUnavailableError, ConfigError
from lightning_shard.ray import (
    RayReportCallback,
    dataset_batches,
    latest_checkpoint,
    prepare_trainer,
)
from tests.ray.fake import FakeWorker

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")


class RaysOwn(LightningEnvironment):
    """Stands for `ray.train.lightning.RayLightningEnvironment`."""


def bare(kind: type[Any]) -> Any:
    return object.__new__(kind)


def trainer(**flags: Any) -> L.Trainer:
    return L.Trainer(**{"strategy": "zero2", "accelerator": "cpu", "logger": False, **flags})


@pytest.mark.parametrize("use", [RayEnvironment, latest_checkpoint])
def test_without_ray_an_error_says_what_to_install(
    use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ray.train.collective", raising=False)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'lightning-shard\[ray\]'"):
        use()


def test_outside_of_a_worker_an_error_says_where_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker().install(monkeypatch)

    def refuse() -> Any:
        raise RuntimeError("`get_context` cannot be used outside of a Ray Train training function.")

    monkeypatch.setattr(sys.modules["ray.train"], "get_context", refuse)
    assert not RayEnvironment.detect()
    for use in (
        RayEnvironment,
        latest_checkpoint,
        lambda: prepare_trainer(trainer(devices=1)),
        lambda: dataset_batches(trainer(devices=1), "rows"),
    ):
        with pytest.raises(ConfigError, match="no worker of Ray Train"):
            use()
    assert worker.reports == []


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (LightningEnvironment, RayEnvironment),
        (RaysOwn, RayEnvironment),
        (SLURMEnvironment, RayEnvironment),
        (RayEnvironment, RayEnvironment),
        (LSFEnvironment, LSFEnvironment),
    ],
)
def test_the_environment_in_use(
    found: type[Any], expected: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeWorker().install(monkeypatch)
    assert type(fitting_environment(bare(found), uses_mpi=False)) is expected


def test_mpi_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeWorker().install(monkeypatch)
    with pytest.raises(ConfigError, match="Ray Train has started this one"):
        fitting_environment(bare(LightningEnvironment), uses_mpi=True)


@pytest.mark.parametrize("devices", ["auto", 1, 2])
def test_ranks_are_rays_whatever_torch_has_in_the_environment(
    devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`devices="auto"` means 1 on CPUs, and torch's backend of Ray has set these variables."""
    FakeWorker(rank=3, size=4, local_rank=1, local_size=2).install(monkeypatch)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK"):
        monkeypatch.setenv(name, "1")
    made = prepare_trainer(trainer(devices=devices))
    assert (made.global_rank, made.local_rank, made.node_rank, made.world_size) == (3, 1, 1, 4)
    assert made.strategy.num_processes == 2
    assert made.strategy.num_nodes == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"devices": 4}, r"devices=4\)\. Pass devices='auto'"),
        ({"devices": 2, "num_nodes": 3}, r"num_nodes=3\)\. Leave num_nodes out"),
    ],
)
def test_a_trainer_that_contradicts_ray(
    flags: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeWorker(rank=0, size=4, local_size=2).install(monkeypatch)
    with pytest.raises(ConfigError, match=message):
        trainer(**flags)


def test_nodes_of_different_numbers_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeWorker(rank=0, size=3, local_size=2).install(monkeypatch)
    assert prepare_trainer(trainer(devices="auto")).strategy.num_nodes == 1


@pytest.mark.parametrize(("size", "host"), [(2, "127.0.0.1"), (4, "node")])
def test_rank_0_tells_where_to_meet_and_the_token(
    size: int, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeWorker(rank=0, size=size, local_size=2).install(monkeypatch)
    util = sys.modules["ray.util"]
    monkeypatch.setattr(util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.delenv("LIGHTNING_SHARD_JOB_TOKEN", raising=False)
    told: list[Any] = []

    def broadcast(what: Any) -> Any:
        told.append(what)
        return what

    monkeypatch.setattr(sys.modules["ray.train.collective"], "broadcast_from_rank_zero", broadcast)
    environment = RayEnvironment()
    assert environment.main_address == "127.0.0.1"
    [(told_host, port, token)] = told
    assert (told_host, port) == (environment.main_address, environment.main_port)
    assert len(told) == 1
    assert len(token) == 32
    assert os.environ["LIGHTNING_SHARD_JOB_TOKEN"] == token


def test_other_ranks_take_the_token_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeWorker(rank=1, size=2, local_size=1).install(monkeypatch)
    monkeypatch.delenv("LIGHTNING_SHARD_JOB_TOKEN", raising=False)
    told = ("10.0.0.1", 1234, "a token that rank 0 has drawn")
    monkeypatch.setattr(
        sys.modules["ray.train.collective"], "broadcast_from_rank_zero", lambda own: own or told
    )
    environment = RayEnvironment()
    assert (environment.main_address, environment.main_port) == told[:2]
    assert os.environ["LIGHTNING_SHARD_JOB_TOKEN"] == told[2]


def test_trainers_that_workers_cannot_be_ranks_of(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeWorker(rank=0, size=2, local_size=2).install(monkeypatch)
    for strategy, plugins, message in (
        ("auto", None, "expected a strategy of lightning_shard"),
        ("zero2_in_process", None, "would train the whole model in each"),
        ("zero2", [InProcessEnvironment(1)], "cluster environment is InProcessEnvironment"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare_trainer(trainer(strategy=strategy, plugins=plugins, devices=1))


def test_options_of_reports() -> None:
    for numbers in ({"every_n_epochs": 0}, {"every_n_epochs": -1}, {"every_n_train_steps": -2}):
        with pytest.raises(ConfigError, match=r"of at least 0|one of them to be above 0"):
            RayReportCallback(**numbers)


def test_what_was_reported_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker(folder=tmp_path).install(monkeypatch)
    assert latest_checkpoint() is None
    storage = worker.get_storage().storage_filesystem
    worker.checkpoint = sys.modules["ray.train"].Checkpoint(tmp_path / "run/one", storage)
    assert latest_checkpoint() == str(tmp_path / "run/one/checkpoint.ckpt")


def test_a_fetched_checkpoint_is_read_when_no_worker_writes_it_anymore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of a node share the folder; the later one writes its files anew."""
    worker = FakeWorker(filesystem="s3").install(monkeypatch)
    done: list[str] = []

    def fetch() -> str:
        done.append("fetched")
        return str(tmp_path)

    monkeypatch.setattr(
        sys.modules["ray.train.collective"], "barrier", lambda: done.append("waited")
    )
    filesystem = worker.get_storage().storage_filesystem
    worker.checkpoint = SimpleNamespace(filesystem=filesystem, to_directory=fetch)
    assert latest_checkpoint() == str(tmp_path / "checkpoint.ckpt")
    assert done == ["fetched", "waited"]
