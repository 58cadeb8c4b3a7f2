"""Each backend's mailbox: what comes early is there, who waits is woken, a last message ends it."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.backends.mpi.backend import INIT_METHOD
from lightning_shard.backends.registry import get_backend
from lightning_shard.data_parallel.async_sgd.mailbox import mailbox_type
from lightning_shard.testing import run_ranks
from tests.groups import join
from tests.mpirun import run_mpi
from tests.processes import run_processes

NUM_MESSAGES, NUM_WORDS = 30, 5000


def is_last(data: Tensor) -> bool:
    return bool(data[0] == NUM_MESSAGES - 1)


def exchange(backend: str) -> dict[int, list[int]]:
    """Send everybody numbers, twice over, and return what has come from whom the second time."""
    world = dist.group.WORLD
    assert world is not None
    ranks = get_backend(backend).collectives(world).duplicate()
    for _ in range(2):
        box = mailbox_type(backend)(ranks, NUM_WORDS, is_last)
        came: dict[int, list[int]] = {peer: [] for peer in box.peers}
        arrivals: list[tuple[int, Tensor]] = []
        for number in range(NUM_MESSAGES):
            for peer in box.peers:
                box.send(peer, torch.full((NUM_WORDS,), number))
            arrivals += box.poll()
        while len(arrivals) < NUM_MESSAGES * len(box.peers):
            arrivals += box.wait()
        assert box.poll() == []
        assert [box.received[peer] for peer in box.peers] == [NUM_MESSAGES] * len(box.peers)
        for peer, data in arrivals:
            assert len(set(data.tolist())) == 1
            came[peer].append(int(data[0]))
        for peer in box.peers:
            box.arrived_there(peer, NUM_MESSAGES // 2)
        box.finish()
    assert ranks.traffic["send"].bytes == 2 * NUM_MESSAGES * len(box.peers) * NUM_WORDS * 8
    return came


def stay_silent(backend: str, seconds: float) -> bool:
    """After the last message nothing waits: a silence longer than the time-out is no error."""
    world = dist.group.WORLD
    assert world is not None
    ranks = get_backend(backend).collectives(world).duplicate(timedelta(seconds=seconds / 2))
    for _ in range(2):
        box = mailbox_type(backend)(ranks, 1, is_last)
        for peer in box.peers:
            box.send(peer, torch.tensor([NUM_MESSAGES - 1]))
        arrivals: list[tuple[int, Tensor]] = []
        while len(arrivals) < len(box.peers):
            arrivals += box.wait()
        box.finish()
        time.sleep(seconds)
    return True


def assert_all_came(results: list[dict[int, list[int]]]) -> None:
    for rank, came in enumerate(results):
        assert came == {p: list(range(NUM_MESSAGES)) for p in range(len(results)) if p != rank}


def over_gloo() -> tuple[dict[int, list[int]], bool]:
    join()
    result = exchange("gloo"), stay_silent("gloo", 2.0)
    dist.destroy_process_group()
    return result


def over_mpi() -> dict[int, list[int]]:
    dist.init_process_group("mpi4py", init_method=INIT_METHOD, timeout=timedelta(seconds=60))
    return exchange("mpi")


def test_in_process() -> None:
    assert_all_came(run_ranks(lambda _: exchange("in_process"), 3))


@pytest.mark.slow
def test_gloo() -> None:
    results = run_processes(over_gloo, 3)
    assert_all_came([came for came, _ in results])
    assert all(silent for _, silent in results)


@pytest.mark.slow
@pytest.mark.mpi
def test_mpi() -> None:
    assert_all_came(run_mpi(over_mpi, 3))
