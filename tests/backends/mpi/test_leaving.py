"""How ranks end: those that leave early are missed at once, those that work on are waited for."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends.mpi import runtime
from lightning_shard.backends.mpi.backend import BACKEND_NAME, INIT_METHOD
from lightning_shard.errors import RankFailedError
from tests.groups import all_ranks
from tests.mpirun import run_mpi

pytestmark = pytest.mark.mpi
SLOW = pytest.mark.slow


def join() -> int:
    # Longer than the tests below: none of them is to wait for it.
    dist.init_process_group(BACKEND_NAME, init_method=INIT_METHOD, timeout=timedelta(minutes=10))
    return dist.get_rank()


def miss_rank_1(operation: str) -> str:
    rank = join()
    collectives = all_ranks("mpi")
    shard = torch.zeros(4)
    collectives.reduce_scatter(shard, torch.ones(8))
    if rank == 1:
        dist.send(shard, dst=0)
        return ""
    dist.recv(shard, src=1)
    calls = {
        "all_reduce": lambda: dist.all_reduce(shard),
        "reduce_scatter": lambda: collectives.reduce_scatter(shard, torch.ones(8)),
        "new_group": lambda: dist.new_group([0, 1]),
    }
    with pytest.raises(RankFailedError) as caught:
        calls[operation]()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "operation",
    ["all_reduce", *(pytest.param(one, marks=SLOW) for one in ("reduce_scatter", "new_group"))],
)
def test_a_rank_that_left_early_does_not_keep_its_peers_waiting(operation: str) -> None:
    message, _ = run_mpi(miss_rank_1, 2, operation=operation)
    assert message.startswith("Rank 0 can never go on with ")
    assert "rank 1 has ended without it. Look for a rank that returned early" in message


def leave_after_a_broadcast() -> float:
    told = torch.full((3,), float(join()))
    if dist.get_rank() == 1:
        time.sleep(1)  # rank 0 is on its way out; rank 2 may depend on this one
    dist.broadcast(told, src=0)
    return told.sum().item()


@pytest.mark.slow
def test_the_root_of_a_broadcast_may_leave_before_the_others_come() -> None:
    assert run_mpi(leave_after_a_broadcast, 3) == [0.0] * 3


def leave_a_message_behind() -> float:
    rank, many = join(), torch.zeros(4_000_000)
    if rank == 1:
        dist.isend(many + 7, dst=0)  # nobody waits for it
    else:
        time.sleep(1)
        dist.recv(many, src=1)
    return many[-1].item()


@pytest.mark.slow
def test_a_message_still_comes_after_its_sender_has_left() -> None:
    assert run_mpi(leave_a_message_behind, 2) == [7.0, 0.0]


def leave_with_a_receive_open() -> int:
    rank = join()
    dist.irecv(torch.zeros(1), src=1 - rank, tag=7)  # the thread asks MPI for it all the time
    runtime.finalize_in_order(_nothing)  # as the environment does; the last to be registered
    return rank


def _nothing() -> None:
    pass


@pytest.mark.slow
def test_the_thread_stops_before_mpi_ends_whoever_asked_for_that_first() -> None:
    assert run_mpi(leave_with_a_receive_open, 2) == [0, 1]


def work_on_alone(seconds: float) -> int:
    rank = join()
    dist.barrier()
    if rank == 0:
        time.sleep(seconds)
    return rank


@pytest.mark.slow
def test_a_rank_that_works_on_alone_at_the_end_is_waited_for() -> None:
    assert run_mpi(work_on_alone, 2, seconds=35.0) == [0, 1]
