"""What another thread can do for one that waits in a group."""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends.liveness.interruption import Interruptible, interrupt_groups
from lightning_shard.backends.rendezvous import join_world
from lightning_shard.core.settings import prefer_loopback_for_gloo
from tests.processes import rank_and_world_size, run_alone, run_processes


def wait_for_each_other() -> str:
    """Wait for a message that is never sent, with a time-out far beyond this test's."""
    rank, world_size = rank_and_world_size()
    prefer_loopback_for_gloo()
    cpu_timeout = timedelta(minutes=10)
    join_world("gloo", rank=rank, world_size=world_size, device=None, timeout=cpu_timeout)
    dist.barrier()
    if rank == 0:
        threading.Timer(0.2, interrupt_groups).start()
    with pytest.raises(RuntimeError) as caught:
        dist.recv(torch.zeros(1), 1 - rank)
    time.sleep(0.5)
    return str(caught.value)


def test_a_wait_in_gloo_ends_on_both_sides() -> None:
    for message in run_processes(wait_for_each_other, 2):
        assert "pair closure" in message or "closed by peer" in message


def wait_beside_a_dead_neighbour(folder: str) -> str:
    """Rank 2, whose next neighbour has died, waits for rank 1, which does nothing."""
    rank, world_size = rank_and_world_size()
    prefer_loopback_for_gloo()
    timeout = timedelta(minutes=10)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timeout)
    dist.barrier()
    if rank == 0:
        os._exit(0)
    is_awake = Path(folder, "awake")
    if rank == 1:
        while not is_awake.exists():
            time.sleep(0.01)
        return ""
    threading.Timer(0.5, interrupt_groups).start()
    with pytest.raises(RuntimeError) as caught:
        dist.recv(torch.zeros(1), 1)
    is_awake.touch()
    return str(caught.value)


def test_a_wait_in_gloo_ends_whoever_is_dead(tmp_path: Path) -> None:
    """A rank closed its connections by a wait for its neighbour, which a dead one refuses."""
    results = run_processes(
        wait_beside_a_dead_neighbour, 3, vanishing_ranks=[0], folder=str(tmp_path)
    )
    assert "pair closure" in results[-1]


def test_groups_of_this_package_are_asked() -> None:
    class Group:
        def interrupt(self) -> None: ...

    assert isinstance(Group(), Interruptible)
    assert not isinstance(object(), Interruptible)


INSIDE_OF_TORCH = """
import threading
from datetime import timedelta

import torch.distributed as dist
from lightning_shard.backends.liveness.interruption import end_at_exit

asked = threading.Event()


def inside():
    try:
        dist.HashStore().wait(["never set"], timedelta(seconds=0.5))
    except RuntimeError:
        asked.wait()
        print("came back")


thread = threading.Thread(target=inside, daemon=True)
end_at_exit(thread, asked.set)
thread.start()
"""


@pytest.mark.slow
def test_a_thread_inside_of_torch_comes_back_before_python_ends() -> None:
    """One that was given up came back while Python ended, and the process aborted."""
    done = run_alone("-c", INSIDE_OF_TORCH)
    assert (done.returncode, done.output) == (0, "came back\n")
