"""What another thread can do for one that waits in a group."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends.liveness.interruption import Interruptible, interrupt_groups
from lightning_shard.backends.rendezvous import join_world
from lightning_shard.settings import prefer_loopback_for_gloo, rank_and_world_size
from tests.processes import run_processes


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


def test_groups_of_this_package_are_asked() -> None:
    class Group:
        def interrupt(self) -> None: ...

    assert isinstance(Group(), Interruptible)
    assert not isinstance(object(), Interruptible)
