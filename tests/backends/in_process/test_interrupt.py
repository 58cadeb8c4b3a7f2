"""Ctrl-C and test time-outs reach the caller's thread, which is rank 0, and end every rank."""

import ctypes
import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from lightning_shard.backends import _c10d
from lightning_shard.backends.in_process.world import current_world
from lightning_shard.errors import RankFailedError
from lightning_shard.testing import run_ranks


def interrupt_from(rank_to_press: int, seen: list[Any], *, spin: bool = False) -> None:
    def fn(rank: int) -> None:
        try:
            dist.barrier()
            if rank == rank_to_press:
                os.kill(os.getpid(), signal.SIGINT)
                while spin:
                    time.sleep(0.01)
            for _ in range(100):
                dist.barrier()
        except BaseException as error:
            seen[rank] = type(error)
            raise

    run_ranks(fn, 3)


@pytest.mark.parametrize("rank_to_press", [0, 1, 2])
def test_ctrl_c_ends_every_rank(rank_to_press: int) -> None:
    seen: list[Any] = [None] * 3
    with pytest.raises(KeyboardInterrupt):
        interrupt_from(rank_to_press, seen)
    assert seen == [KeyboardInterrupt, RankFailedError, RankFailedError]
    assert current_world() is None
    run_ranks(lambda rank: dist.barrier(), 3)


def test_ctrl_c_while_a_rank_never_comes_back() -> None:
    seen: list[Any] = [None] * 3
    with pytest.raises(KeyboardInterrupt):
        interrupt_from(1, seen, spin=True)
    assert seen[0] is KeyboardInterrupt
    assert seen[2] is RankFailedError
    run_ranks(lambda rank: dist.barrier(), 3)


def test_ctrl_c_between_the_end_of_rank_0_and_that_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(_c10d, "forget_groups", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(lambda rank: None if rank == 0 else dist.barrier(), 3)
    assert current_world() is None
    run_ranks(lambda rank: dist.barrier(), 3)


def test_a_signal_that_no_system_call_of_rank_0_noticed() -> None:
    # The handler may run just before rank 0's thread falls asleep; Python then finds out only when
    # that thread wakes. `simulate` flags a signal without one being delivered.
    simulate = ctypes.pythonapi.PyErr_SetInterrupt

    def fn(rank: int) -> None:
        dist.barrier()
        if rank == 1:
            simulate()
            while True:
                time.sleep(0.01)
        dist.barrier()

    with pytest.raises(KeyboardInterrupt):
        run_ranks(fn, 3)
