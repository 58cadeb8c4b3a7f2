"""What a strategy is called, which backend it takes, and what a notebook is told."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.connectors import accelerator_connector

import lightning_shard
from lightning_shard import DDPStrategy, ElasticStrategy, ZeRO2Strategy
from lightning_shard.core.schemes import SCHEMES
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.names import strategy_name


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Lightning sets when it is imported where `sys.ps1` is."""
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)


def trainer_of(strategy: Any, devices: int = 2) -> pl.Trainer:
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        logger=False,
        enable_checkpointing=False,
    )


def test_every_registered_name_is_found_again() -> None:
    for scheme in SCHEMES:
        name = strategy_name(StrategyRegistry.get(scheme))
        assert name == ("zero3" if scheme == "shard_fsdp" else scheme)
    assert strategy_name(StrategyRegistry.get("shard_ddp_topk")) == "shard_ddp_topk"
    assert strategy_name(lightning_shard.ZeRO2Strategy(compression="int8")) == "zero2"

    class Mine(lightning_shard.ZeRO3Strategy):
        pass

    assert strategy_name(Mine()) == "zero3"


@pytest.mark.usefixtures("notebook")
@pytest.mark.parametrize("name", ["zero2", "pipeline_parallel", "shard_ddp_topk", "elastic"])
def test_a_notebook_is_told_to_use_ranks_in_process(name: str) -> None:
    """A notebook was told to use ddp_notebook."""
    with pytest.raises(ConfigError, match=rf"strategy='{name}_in_process', devices=2\)"):
        trainer_of(name)
    with pytest.raises(ConfigError, match=rf"strategy='{name}_in_process'"):
        trainer_of(f"{name}_gloo")
    assert trainer_of(f"{name}_in_process").strategy.mesh_size == 2


@pytest.mark.usefixtures("notebook")
def test_one_rank_needs_no_process_and_works_in_a_notebook() -> None:
    assert trainer_of("zero2", devices=1).world_size == 1
    with pytest.raises(ConfigError, match="elastic_in_process"):
        trainer_of("elastic", devices=1)  # its rendezvous server is a process


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("make", "options", "num_devices", "num_nodes", "name"),
    [
        (ZeRO2Strategy, {}, 2, 1, "shm"),
        (DDPStrategy, {"debug": True}, 3, 1, "shm"),
        (ZeRO2Strategy, {}, 1, 1, "gloo"),
        (ZeRO2Strategy, {}, 2, 2, "gloo"),
        (ZeRO2Strategy, {"backend": "gloo"}, 2, 1, "gloo"),
        (ElasticStrategy, {}, 2, 1, "gloo"),
    ],
)
def test_ranks_of_one_host_share_memory(
    make: type[DataParallelStrategy],
    options: dict[str, Any],
    num_devices: int,
    num_nodes: int,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    strategy = make(parallel_devices=[CPU] * num_devices, **options)
    strategy.num_nodes = num_nodes

    assert strategy.backend.name == name


def test_ranks_of_a_launcher_that_does_not_tell_of_one_host_share_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "worker-0.example")
    strategy = ZeRO2Strategy(parallel_devices=[CPU] * 2)

    assert strategy.backend.name == "gloo"
