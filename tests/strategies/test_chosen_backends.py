"""Which backend a strategy takes where none is named."""

from typing import Any

import pytest
import torch

from lightning_shard import DDPStrategy, ElasticStrategy, ZeRO2Strategy
from lightning_shard.strategies.base import ShardStrategy

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
    make: type[ShardStrategy],
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
