"""Meeting at rank 0's store, and failing to."""

import os
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends import liveness, rendezvous
from lightning_shard.backends.base import GlooBackend
from lightning_shard.errors import ConfigError, RankFailedError
from tests.processes import free_port, rank_and_world_size, run_processes


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


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("rank", "who"),
    [(0, "1 of 2 ranks have come: 0. Not yet: 1."), (1, "Rank 0, where the others meet, does not")],
)
def test_nobody_else_comes(rank: int, who: str) -> None:
    with pytest.raises(RankFailedError, match=f"Rank {rank} of 2 could not meet") as caught:
        join(rank)
    assert who in str(caught.value)
    assert not dist.is_initialized()


def test_the_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(RankFailedError, match=f"MASTER_PORT={port}"):
            join(0)


def come(late_seconds: float = 0, group_seconds: float = 60) -> bool:
    """Meet the others, the last rank late."""
    rank, world_size = rank_and_world_size()
    time.sleep(late_seconds if rank == world_size - 1 else 0)
    timeout = timedelta(seconds=group_seconds)
    GlooBackend().init_process_group(
        rank=rank, world_size=world_size, device=torch.device("cpu"), timeout=timeout
    )
    has_lifeline = liveness.current() is not None
    dist.barrier()
    dist.destroy_process_group()
    return has_lifeline


@pytest.mark.slow
def test_coming_later_than_the_time_out_is_no_silence() -> None:
    """Rank 0 waited in the rendezvous, the others in Gloo, which gave up."""
    assert run_processes(come, 3, late_seconds=8, group_seconds=6) == [True] * 3


def come_twice_to_a_store_that_stays() -> list[bool]:
    rank, _ = rank_and_world_size()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent = dist.TCPStore(host, port, is_master=True, wait_for_workers=False) if rank == 0 else None
    came = [come(), come()]
    liveness.stop()
    # The agent outlives its ranks.
    ended = dist.TCPStore(host, port, is_master=False)
    ended.set(f"ended/{rank}", "")
    if agent is not None:
        agent.wait(["ended/0", "ended/1"])
    return came


def test_under_torchrun_a_second_group_met_the_first_ones_addresses() -> None:
    assert run_processes(come_twice_to_a_store_that_stays, 2) == [[True, True]] * 2
