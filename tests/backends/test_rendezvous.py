"""Meeting at rank 0's store, and failing to."""

import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_shard import settings
from lightning_shard.backends import liveness, rendezvous
from lightning_shard.backends.gloo import GlooBackend
from lightning_shard.errors import ConfigError, RankFailedError
from tests.processes import free_port, run_processes


def join(rank: int) -> None:
    GlooBackend().init_process_group(
        rank=rank, world_size=2, device=torch.device("cpu"), timeout=timedelta(seconds=1)
    )


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(rendezvous, "SHORTEST_MEETING", timedelta(seconds=1))


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=f"environment variable {name} is not set"):
        join(0)


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_else_comes(rank: int) -> None:
    with pytest.raises(RankFailedError, match=f"Rank {rank} of 2 could not meet the others at"):
        join(rank)
    assert not dist.is_initialized()


def test_the_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(RankFailedError, match=f"MASTER_PORT={port}"):
            join(0)


def come_late() -> bool:
    rank, world_size = settings.rank_and_world_size()
    time.sleep(2 * rank)
    timeout = timedelta(seconds=1)
    GlooBackend().init_process_group(
        rank=rank, world_size=world_size, device=torch.device("cpu"), timeout=timeout
    )
    has_lifeline = liveness.current() is not None
    dist.destroy_process_group()
    return has_lifeline


def test_coming_later_than_the_time_out_is_no_silence() -> None:
    assert run_processes(come_late, 2) == [True, True]
