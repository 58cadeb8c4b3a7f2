"""Deadlocks, mismatches and failures: an error on every rank, and the next run works."""

import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_shard.errors import (
    CollectiveMismatchError,
    ConfigError,
    DeadlockError,
    RankFailedError,
    ShardError,
)
from lightning_shard.testing import run_ranks


def run_and_collect(
    fn: Callable[[int], Any], num_ranks: int
) -> tuple[BaseException, list[BaseException | None]]:
    """Return what the caller sees, and what each rank saw."""
    seen: list[BaseException | None] = [None] * num_ranks

    def watched(rank: int) -> None:
        try:
            fn(rank)
        except BaseException as error:
            seen[rank] = error
            raise

    with pytest.raises(BaseException) as caught:  # noqa: PT011 - the tests look at it
        run_ranks(watched, num_ranks)
    assert run_ranks(lambda rank: rank, num_ranks) == list(range(num_ranks))
    return caught.value, seen


def test_deadlock_lists_where_every_rank_waits() -> None:
    def fn(rank: int) -> None:
        dist.barrier()
        if rank == 0:
            dist.recv(torch.zeros(3), src=1)
        elif rank == 1:
            dist.all_reduce(torch.zeros(2))
        elif rank == 2:
            dist.distributed_c10d._get_default_store().get("never")

    error, seen = run_and_collect(fn, 4)
    assert [type(e) for e in seen] == [DeadlockError] * 3 + [type(None)]
    assert error is seen[0]
    text = str(seen[1])
    assert "Rank 1 waits for ever" in text
    assert "rank 0: recv(float32 (3,), peer 1), number 1 of group '0'" in text
    assert "rank 1: all_reduce(SUM, float32 (2,)), number 2 of group '0'" in text
    assert "waiting for rank 0, 2, 3" in text
    assert "rank 2: store.wait" in text
    assert "rank 3: finished" in text
    assert text.count(f"at {__file__}:") >= 4


@pytest.mark.parametrize(
    ("call", "got", "expected"),
    [
        (lambda r: dist.barrier() if r else dist.all_reduce(torch.ones(1)), "barrier", "all_red"),
        (lambda r: dist.all_reduce(torch.ones(2 + r)), "float32 (3,)", "float32 (2,)"),
        (
            lambda r: dist.all_reduce(torch.ones(1, dtype=[torch.int64, torch.float64][r])),
            "float64",
            "int64",
        ),
        (
            lambda r: dist.all_reduce(torch.ones(1), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][r]),
            "MAX",
            "SUM",
        ),
        (lambda r: dist.broadcast(torch.ones(1), src=r), "root 1", "root 0"),
        (lambda r: dist.all_gather([torch.ones(1 + r)] * 2, torch.ones(1 + r)), "(2,)", "(1,)"),
        (
            lambda r: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 3], [2, 2]),
            "all_to_all_single",
            "has room for",
        ),
        (
            lambda r: dist.recv(torch.ones(1), 0) if r else dist.send(torch.ones(2), 1),
            "recv(float32 (1,), peer 0)",
            "send(float32 (2,), peer 1)",
        ),
    ],
)
def test_mismatch_is_raised_on_every_rank(
    call: Callable[[int], Any], got: str, expected: str
) -> None:
    _, seen = run_and_collect(call, 2)
    for rank, error in enumerate(seen):
        assert type(error) is CollectiveMismatchError
        assert f"This is rank {rank}" in str(error)
        assert got in str(error)
        assert expected in str(error)
        assert str(error).count(__file__) >= 2


def test_mismatch_reaches_ranks_that_wait_elsewhere() -> None:
    def fn(rank: int) -> None:
        pair = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(torch.ones(1 + rank), group=pair)
        dist.barrier()

    _, seen = run_and_collect(fn, 3)
    assert [type(error) for error in seen] == [CollectiveMismatchError] * 3


def test_caller_sees_the_failed_ranks_own_exception() -> None:
    def blow_up() -> None:
        raise ValueError("mine")

    def fn(rank: int) -> None:
        if rank == 1:
            blow_up()
        dist.all_reduce(torch.ones(2))

    error, seen = run_and_collect(fn, 3)
    assert error is seen[1]
    assert error.__notes__ == ["This was raised on rank 1 of 3."]
    assert "blow_up" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    for rank in (0, 2):
        peer = seen[rank]
        assert type(peer) is RankFailedError
        assert "rank 1 raised ValueError: mine" in str(peer)
        assert "all_reduce(SUM, float32 (2,))" in str(peer)
        assert peer.__cause__ is error


def test_the_end_of_a_process_ends_the_others_too() -> None:
    def fn(rank: int) -> None:
        if rank == 1:
            raise SystemExit(3)
        dist.barrier()

    error, seen = run_and_collect(fn, 3)
    assert error is seen[1]
    assert [type(e) for e in seen] == [RankFailedError, SystemExit, RankFailedError]


def test_failure_of_rank_0_ends_the_others() -> None:
    def fn(rank: int) -> None:
        if rank == 0:
            raise KeyError("zero")
        dist.barrier()

    error, seen = run_and_collect(fn, 3)
    assert type(error) is KeyError
    assert [type(e) for e in seen[1:]] == [RankFailedError] * 2


def test_rank_that_swallows_errors_is_told_again() -> None:
    def fn(rank: int) -> None:
        if rank == 0:
            raise ValueError("first")
        for _ in range(3):
            with suppress(ShardError):
                dist.barrier()
        dist.barrier()

    error, seen = run_and_collect(fn, 2)
    assert type(error) is ValueError
    assert type(seen[1]) is RankFailedError


def test_failure_while_a_peer_is_in_backward_of_ddp() -> None:
    def fn(rank: int) -> None:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        loss = model(torch.ones(1, 2)).sum()
        if rank == 1:
            raise ValueError("before backward")
        loss.backward()

    error, seen = run_and_collect(fn, 2)
    assert type(error) is ValueError
    assert type(seen[0]) is RankFailedError


def test_worlds_do_not_nest() -> None:
    error, _ = run_and_collect(lambda rank: run_ranks(lambda r: r, 2), 2)
    assert type(error) is ConfigError
    assert "nest" in str(error)


def test_collectives_from_a_helper_thread_are_refused() -> None:
    def fn(rank: int) -> str:
        raised: list[BaseException] = []

        def helper() -> None:
            try:
                dist.barrier()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=helper)
        thread.start()
        thread.join()
        return type(raised[0]).__name__

    assert run_ranks(fn, 2) == ["ConfigError"] * 2


def test_group_of_a_world_that_has_ended() -> None:
    groups = run_ranks(lambda rank: dist.group.WORLD, 2)
    with pytest.raises(ConfigError, match="has ended"):
        groups[0].barrier()


def test_outside_a_world() -> None:
    from datetime import timedelta

    from lightning_shard.backends.in_process import InProcessBackend
    from lightning_shard.backends.in_process.world import current_rank, current_world

    assert current_world() is None
    assert current_rank() is None
    backend = InProcessBackend()
    assert backend.unavailable_reason() is None
    with pytest.raises(ConfigError, match="run_ranks"):
        backend.init_process_group(
            rank=0, world_size=1, device=torch.device("cpu"), timeout=timedelta(seconds=1)
        )
