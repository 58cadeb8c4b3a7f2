"""A world whose ranks come and go, without anybody who decides on generations but the test."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_shard.backends.in_process import InProcessBackend
from lightning_shard.backends.in_process.rank import Status
from lightning_shard.backends.in_process.world import ElasticWorld, current_rank, current_world
from lightning_shard.errors import ConfigError, DeadlockError, RankFailedError
from lightning_shard.testing import Fault


def init() -> None:
    from datetime import timedelta

    rank, size = world().group_rank
    InProcessBackend().init_process_group(
        rank=rank, world_size=size, device=torch.device("cpu"), timeout=timedelta(seconds=10)
    )


def world() -> ElasticWorld:
    running = current_world()
    assert isinstance(running, ElasticWorld)
    return running


def run(fn: Callable[[int], Any], num_ranks: int, *faults: Fault) -> list[Any]:
    return ElasticWorld(num_ranks, faults).run(fn)


def total() -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def identity() -> dict[str, Any]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return {
        "c10d": (dist.get_rank(), dist.get_world_size()),
        "world": (current_rank(), world().num_ranks),
        "variables": [os.environ[name] for name in names],
        "rank_zero": rank_zero_only.rank,
    }


def test_a_rank_has_another_identity_in_the_next_generation() -> None:
    def fn(thread: int) -> list[dict[str, Any]]:
        init()
        seen = [identity()]
        world().drop_groups()
        assert not dist.is_initialized()
        if thread == 1:
            return seen
        world().reconfigure(1, [2, 0])
        init()
        assert total() == 2.0
        return [*seen, identity()]

    def expected(rank: int, size: int) -> dict[str, Any]:
        return {
            "c10d": (rank, size),
            "world": (rank, size),
            "variables": [str(rank), str(rank), str(size), str(size)],
            "rank_zero": rank,
        }

    assert run(fn, 3) == [
        [expected(0, 3), expected(1, 2)],
        [expected(1, 3)],
        [expected(2, 3), expected(0, 2)],
    ]


def test_an_added_rank_begins_alone_and_is_not_rank_zero() -> None:
    def fn(thread: int) -> Any:
        init()
        if thread < 2:
            for step in range(3):
                world().begin_step(step)
                dist.barrier()
            return None
        assert world().is_spare
        assert total() == 1.0
        return dist.get_rank(), current_rank(), rank_zero_only.rank, os.environ["RANK"]

    assert run(fn, 2, Fault(2, 1, "add", at_step=1)) == [None, None, (0, 2, 2, "2")]


def test_each_thread_has_streams_of_its_own_that_generations_leave_alone() -> None:
    def fn(thread: int) -> float:
        torch.manual_seed(thread)
        world().reconfigure(1, [1, 0])
        init()
        dist.barrier()
        return torch.rand(()).item()

    expected = [torch.rand((), generator=torch.Generator().manual_seed(t)).item() for t in (0, 1)]
    assert run(fn, 2) == expected


def test_one_that_is_never_added_keeps_nobody_waiting() -> None:
    def fn(thread: int) -> int:
        init()
        dist.barrier()
        return thread

    assert run(fn, 2, Fault(2, 1, "add", at_step=9)) == [0, 1, None]


def test_one_that_is_never_added_hides_no_deadlock() -> None:
    def fn(thread: int) -> None:
        init()
        dist.recv(torch.ones(1), 1 - thread)

    with pytest.raises(DeadlockError, match="rank 2: a spare, not added yet"):
        run(fn, 2, Fault(2, 1, "add", at_step=9))


def test_a_rank_that_raises_does_not_end_the_others() -> None:
    def fn(thread: int) -> float:
        init()
        if thread == 1:
            raise ValueError("own")
        with pytest.raises(RankFailedError, match="rank 1 raised ValueError: own"):
            dist.barrier()
        world().drop_groups()
        world().reconfigure(1, [0, 2])
        init()
        return total()

    running = ElasticWorld(3)
    assert running.run(fn) == [2.0, None, 2.0]
    assert running.survivors() == [0, 2]
    assert [type(error) for error in running.failures_of_members().values()] == []


def test_an_interruption_ends_the_others() -> None:
    ended: list[int] = []

    def fn(thread: int) -> None:
        init()
        if thread == 1:
            raise KeyboardInterrupt
        try:
            dist.barrier()
        except RankFailedError:
            with suppress(RankFailedError):
                dist.barrier()
            ended.append(thread)
            raise

    with pytest.raises(KeyboardInterrupt):
        run(fn, 3)
    assert sorted(ended) == [0, 2]


def test_an_error_that_ends_all_is_raised_and_not_one_that_they_had_survived() -> None:
    def fn(thread: int) -> None:
        init()
        if thread == 0:
            raise SystemExit(143)
        world().drop_groups()
        world().reconfigure(1, [1, 2])
        init()
        dist.recv(torch.ones(1), 1 - dist.get_rank())

    with pytest.raises(DeadlockError):
        run(fn, 3)


def test_a_failure_that_somebody_swallows_comes_again() -> None:
    def fn(thread: int) -> float:
        init()
        with suppress(RankFailedError):  # as Lightning does around some of its own calls
            dist.barrier()
        with pytest.raises(RankFailedError, match="broken" if thread == 0 else "has left"):
            dist.barrier()
        world().drop_groups()
        world().reconfigure(1, [0, 1])
        init()
        return total()

    assert run(fn, 2, Fault(0, 1, "fail")) == [2.0, 2.0]


def test_the_end_of_a_process_does_not_end_the_others() -> None:
    def fn(thread: int) -> int:
        init()
        if thread == 0:
            raise SystemExit(143)
        return thread

    assert run(fn, 2) == [None, 1]


def test_an_error_is_told_rather_than_the_end_of_a_process() -> None:
    def fn(thread: int) -> int:
        init()
        if thread == 0:
            raise SystemExit(143)
        raise ValueError(f"of thread {thread}")

    with pytest.raises(ValueError, match="of thread 1"):
        run(fn, 3)


def test_a_mismatch_ends_all() -> None:
    from lightning_shard.errors import CollectiveMismatchError

    seen: list[int] = []

    def fn(thread: int) -> None:
        init()
        with pytest.raises(CollectiveMismatchError):
            dist.all_reduce(torch.ones(1 + thread))
        seen.append(thread)
        dist.barrier()

    with pytest.raises(CollectiveMismatchError):
        run(fn, 2)
    assert sorted(seen) == [0, 1]


def test_what_is_shared_with_one_that_has_gone_on_raises() -> None:
    def fn(thread: int) -> str:
        init()
        if thread == 0:
            world().drop_groups()
            world().reconfigure(1, [0])
            init()
            assert total() == 1.0
            return ""
        with pytest.raises(RankFailedError, match="has left these groups") as caught:
            dist.recv(torch.ones(1), 0)
        return str(caught.value)

    message = run(fn, 2)[1]
    assert "Rank 1 cannot go on with recv" in message
    assert "rank 0 has left" in message


def test_a_receive_from_anybody_ends_when_nobody_is_left_to_send() -> None:
    def fn(thread: int) -> None:
        init()
        if thread == 0:
            with pytest.raises(RankFailedError, match="has left these groups"):
                dist.recv(torch.ones(1))
        world().drop_groups()

    assert run(fn, 3) == [None] * 3


def test_a_wait_on_the_store_ends_when_a_rank_has_left() -> None:
    def fn(thread: int) -> None:
        init()
        if thread == 0:
            with pytest.raises(RankFailedError, match=r"store\.wait.* has left these groups"):
                dist.distributed_c10d._get_default_store().get("never")

    assert run(fn, 2) == [None, None]


def test_generations_do_not_meet_in_the_store_or_in_groups_of_one_name() -> None:
    def fn(thread: int) -> bytes:
        init()
        if thread == 1:
            pairs = [dist.new_group([0, 1]) for _ in range(3)]  # rank 0 has made none
            assert len(pairs) == 3
        store = dist.distributed_c10d._get_default_store()
        store.set("key", "old")
        world().drop_groups()
        world().reconfigure(1, [0, 1])
        init()
        pair = dist.new_group([0, 1])
        ones = torch.ones(1)
        dist.all_reduce(ones, group=pair)
        assert ones.item() == 2.0
        store = dist.distributed_c10d._get_default_store()
        if thread == 0:
            store.set("key", "new")
        value: bytes = store.get("key")
        return value

    assert run(fn, 2) == [b"new", b"new"]


def test_messages_name_rank_and_thread_where_they_differ() -> None:
    def fn(thread: int) -> str:
        if thread == 0:
            return ""
        world().reconfigure(1, [2, 1])
        init()
        if thread == 1:
            dist.barrier()
        with pytest.raises(RankFailedError) as caught:
            dist.barrier()
        return str(caught.value)

    messages = run(fn, 3, Fault(1, 1, "drop"))
    assert "Rank 0 cannot go on with barrier" in messages[2]
    assert "rank 1 is gone" in messages[2]
    messages = run(lambda thread: _swapped(thread), 2, Fault(0, 1, "drop"))
    assert "rank 1 (thread 0) is gone" in messages[1]


def _swapped(thread: int) -> str:
    world().reconfigure(1, [1, 0])
    init()
    with pytest.raises(RankFailedError) as caught:
        dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    ("number", "threads"),
    [(1, [0]), (0, [0, 1]), (1, [0, 1])],
    ids=["without it", "an old one", "with groups still"],
)
def test_a_wrong_reconfiguration_is_refused(number: int, threads: list[int]) -> None:
    def fn(thread: int) -> None:
        if thread == 0:
            return
        if (number, threads) == (1, [0, 1]):
            init()
        else:
            world().leave_generation(0)
        with pytest.raises(ConfigError, match=r"after drop_groups"):
            world().reconfigure(number, threads)

    assert run(fn, 2) == [None, None]


def test_survivors_are_those_of_the_last_generation() -> None:
    def fn(thread: int) -> None:
        if thread != 0:
            world().reconfigure(1, [2, 1])
        if thread == 1:
            raise ValueError("own")

    running = ElasticWorld(3)
    running.run(fn)
    assert running.survivors() == [2]
    assert running.has_ended_well(0)
    assert list(running.failures_of_members()) == [1]


def test_watchers_hear_how_each_rank_has_ended() -> None:
    heard: list[tuple[int, str]] = []

    def fn(thread: int) -> None:
        init()
        if thread == 0:
            world().call_when_ended(lambda *event: heard.append(event))
        if thread == 1:
            raise ValueError("own")
        if thread == 2:
            dist.barrier()

    running = ElasticWorld(4, [Fault(2, 1, "drop")])
    running.run(fn)
    assert heard == [(0, "ended"), (1, "raised ValueError: own"), (2, "died"), (3, "ended")]
    assert [rank.status for rank in running.scheduler.ranks] == [
        Status.FINISHED,
        Status.FAILED,
        Status.GONE,
        Status.FINISHED,
    ]


def test_a_standstill_is_ended_by_whoever_can() -> None:
    def fn(thread: int) -> list[str]:
        news: list[str] = []
        if thread == 0:
            world().wait_for_news(
                lambda: bool(news), lambda: "news", lambda: news.append("the hour has come") is None
            )
        return news

    assert run(fn, 2) == [["the hour has come"], []]


def test_a_standstill_that_nobody_ends_is_a_deadlock() -> None:
    def fn(thread: int) -> None:
        world().wait_for_news(lambda: False, lambda: "news that never come", lambda: False)

    with pytest.raises(DeadlockError, match="rank 1: news that never come"):
        run(fn, 2)


def test_the_callers_globals_are_as_before() -> None:
    before = dict(os.environ), getattr(rank_zero_only, "rank", None)
    faults = [Fault(0, 1, "drop"), Fault(2, 1, "add", at_step=0)]

    def fn(thread: int) -> None:
        world().begin_step(0)
        world().reconfigure(1, [thread])
        init()
        total()

    run(fn, 2, *faults)
    assert (dict(os.environ), getattr(rank_zero_only, "rank", None)) == before
    assert current_world() is None
    assert not dist.is_initialized()
