"""`run_ranks`: its arguments, its order, its seeds, and injected faults."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.in_process.faults import faults_to_inject
from lightning_shard.backends.in_process.world import ElasticWorld
from lightning_shard.backends.traffic import OPERATIONS
from lightning_shard.errors import ConfigError, DeadlockError, RankFailedError
from lightning_shard.testing import Expected, Fault, assert_traffic, injected_faults, run_ranks
from tests.groups import all_ranks


def test_results_come_in_rank_order() -> None:
    def fn(rank: int) -> tuple[int, int]:
        return rank, dist.get_world_size()

    assert run_ranks(fn, 3) == [(0, 3), (1, 3), (2, 3)]


def test_each_rank_has_its_own_seed() -> None:
    def fn(rank: int) -> float:
        return torch.rand(()).item()

    first = run_ranks(fn, 3, seed=5)
    assert first == run_ranks(fn, 3, seed=5)
    assert len(set(first)) == 3
    torch.manual_seed(6)
    assert first[1] == torch.rand(()).item()


def test_ranks_run_in_the_same_order_on_every_run() -> None:
    def order() -> list[tuple[int, int]]:
        seen = []

        def fn(rank: int) -> None:
            for step in range(4):
                seen.append((step, rank))
                dist.barrier()

        run_ranks(fn, 3)
        return seen

    assert order() == order()


@pytest.mark.parametrize("num_ranks", [0, -1, 1.5, True, "2"])
def test_wrong_number_of_ranks(num_ranks: Any) -> None:
    with pytest.raises(ConfigError, match="num_ranks"):
        run_ranks(lambda rank: None, num_ranks)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True])
def test_wrong_seed(seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed"):
        run_ranks(lambda rank: None, 2, seed=seed)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"rank": -1}, "rank"),
        ({"at_collective": 0}, "at_collective"),
        ({"kind": "explode"}, "kind"),
        ({"kind": "delay", "seconds": -1.0}, "seconds"),
        ({"kind": "delay", "seconds": float("inf")}, "seconds"),
        ({"kind": "fail", "seconds": 1.0}, "delay"),
        ({"kind": "leave", "seconds": 1.0}, "delay"),
        ({"at_step": -1}, "at_step"),
        ({"kind": "add"}, "at_step=None"),
        ({"kind": "add", "at_step": 3, "at_collective": 2}, "at_collective=1"),
    ],
)
def test_wrong_faults(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Fault(**({"rank": 0, "at_collective": 1, "kind": "fail"} | fields))


def test_fault_of_a_rank_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="below 2"):
        run_ranks(lambda rank: None, 2, faults=[Fault(2, 1, "fail")])


@pytest.mark.parametrize(
    "fault", [Fault(2, 1, "add", at_step=1), Fault(1, 1, "leave"), Fault(1, 1, "drop", at_step=1)]
)
def test_a_fault_for_ranks_that_come_and_go_is_refused_elsewhere(fault: Fault) -> None:
    with pytest.raises(ConfigError, match="only in an elastic world"):
        run_ranks(lambda rank: None, 2, faults=[fault])


def test_ranks_are_added_under_numbers_of_their_own() -> None:
    faults = [Fault(rank, 1, "add", at_step=1) for rank in (3, 5)]
    with pytest.raises(ConfigError, match=r"\[3, 5\], expected \[3, 4\]"):
        ElasticWorld(3, faults)


def test_faults_are_injected_inside_their_context_only() -> None:
    outer, inner = Fault(0, 1, "fail"), Fault(1, 1, "fail")
    assert faults_to_inject() == ((), [])
    with injected_faults([outer]):
        with injected_faults([inner]) as struck:
            assert faults_to_inject() == ((inner,), struck)
        assert faults_to_inject()[0] == (outer,)
    assert faults_to_inject() == ((), [])


def count_barriers(seen: list[int], swallow: bool = False) -> Any:
    def fn(rank: int) -> int:
        for _ in range(4):
            try:
                dist.barrier()
            except RankFailedError:
                if swallow:
                    return -1
                raise
            seen[rank] += 1
        return seen[rank]

    return fn


@pytest.mark.parametrize("rank", [0, 1])
def test_fail(rank: int) -> None:
    seen = [0, 0]
    with pytest.raises(RankFailedError, match=rf"Rank {rank} fails on purpose at its operation 3"):
        run_ranks(count_barriers(seen), 2, faults=[Fault(rank, 3, "fail")])
    assert seen == [2, 2]


def test_delay_keeps_a_rank_from_running() -> None:
    order = []

    def fn(rank: int) -> None:
        pair = dist.new_group([0, 1])
        if rank != 2:
            dist.all_reduce(torch.ones(1), group=pair)
        order.append(rank)

    run_ranks(fn, 3, faults=[Fault(0, 1, "delay", 0.05)])
    assert order[0] == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_drop_is_noticed_by_the_peers(rank: int) -> None:
    seen = [0, 0, 0]
    with pytest.raises(RankFailedError, match=f"rank {rank} is gone"):
        run_ranks(count_barriers(seen), 3, faults=[Fault(rank, 3, "drop")])
    assert seen == [2, 2, 2]


def test_survivors_of_a_drop_can_go_on() -> None:
    def fn(rank: int) -> float:
        survivors = dist.new_group([0, 2])
        try:
            dist.barrier()
        except RankFailedError:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=survivors)
            return tensor.item()
        return 0.0

    assert run_ranks(fn, 3, faults=[Fault(1, 1, "drop")]) == [2.0, None, 2.0]


def test_drop_while_peers_wait_on_it_elsewhere() -> None:
    def fn(rank: int) -> None:
        if rank == 0:
            dist.recv(torch.zeros(1), src=1)
        else:
            dist.send(torch.zeros(1), dst=0)

    with pytest.raises(RankFailedError, match="Rank 0 cannot go on with recv"):
        run_ranks(fn, 2, faults=[Fault(1, 1, "drop")])


def test_a_rank_that_has_finished_is_named() -> None:
    with pytest.raises(DeadlockError, match="rank 1: finished"):
        run_ranks(lambda rank: None if rank else dist.barrier(), 2)


def test_what_a_dropped_rank_had_done_its_part_for_is_full() -> None:
    def fn(rank: int) -> float:
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=True)
        if rank == 0:
            dist.barrier()  # dropped here, before its peers have called the all-reduce
        work.wait()
        return tensor.item()

    assert run_ranks(fn, 3, faults=[Fault(0, 2, "drop")]) == [None, 3.0, 3.0]


@pytest.mark.parametrize("wait_first", [False, True])
def test_a_message_of_a_dropped_rank_arrives(wait_first: bool) -> None:
    def fn(rank: int) -> float:
        tensor = torch.ones(1)
        if rank == 0:
            dist.isend(tensor + 1, 1)
            dist.barrier()
        if wait_first:
            dist.recv(tensor, 0)
        else:
            dist.irecv(tensor, 0).wait()
        return tensor.item()

    assert run_ranks(fn, 2, faults=[Fault(0, 2, "drop")]) == [None, 2.0]


def test_a_receive_from_anybody_ends_when_the_sender_was_dropped() -> None:
    def fn(rank: int) -> None:
        if rank == 0:
            dist.recv(torch.zeros(1))
        elif rank == 1:
            dist.send(torch.zeros(1), dst=0)

    with pytest.raises(RankFailedError, match="rank 1 is gone"):
        run_ranks(fn, 3, faults=[Fault(1, 1, "drop")])


def test_a_wait_on_the_store_ends_when_a_rank_was_dropped() -> None:
    def fn(rank: int) -> None:
        if rank == 1:
            dist.barrier()
        dist.distributed_c10d._get_default_store().get("never")

    with pytest.raises(RankFailedError, match="rank 1 is gone"):
        run_ranks(fn, 2, faults=[Fault(1, 1, "drop")])


@pytest.mark.parametrize("dropped", [False, True])
def test_asking_for_ever_whether_it_is_done_ends(dropped: bool) -> None:
    def fn(rank: int) -> None:
        if rank == 1 and not dropped:
            return
        work = dist.barrier(async_op=True)
        while not work.is_completed():
            pass

    expected = RankFailedError if dropped else DeadlockError
    with pytest.raises(expected, match="rank 1"):
        run_ranks(fn, 2, faults=[Fault(1, 1, "drop")] if dropped else [])


def test_asking_often_is_no_deadlock_while_a_rank_is_delayed() -> None:
    def fn(rank: int) -> int:
        work = dist.barrier(async_op=True)
        asked = 0
        while not work.is_completed():
            asked += 1
        return asked

    assert run_ranks(fn, 2, faults=[Fault(1, 1, "delay", 0.3)])[1] == 0


def test_expected_traffic_passes() -> None:
    def body(rank: int) -> None:
        collectives = all_ranks()
        collectives.all_reduce(torch.ones(4))  # before the block: not counted
        with assert_traffic(
            collectives,
            allow=["barrier"],
            all_reduce=Expected(calls=2, elements=8, bytes=32),
            broadcast=Expected(bytes=12),
        ):
            for _ in range(2):
                collectives.all_reduce(torch.ones(4))
            collectives.duplicate().broadcast(torch.ones(3))
            collectives.barrier()
        with assert_traffic(collectives):
            pass

    run_ranks(body, 2)


def send_more_than_expected(collectives: Collectives) -> None:
    with assert_traffic(
        collectives, all_gather=Expected(calls=2, bytes=8), all_reduce=Expected(calls=1, bytes=4)
    ):
        collectives.all_gather(torch.ones(4), torch.ones(2))
        collectives.all_reduce(torch.ones(1000))
        collectives.barrier()


def test_the_error_lists_what_was_got_and_expected() -> None:
    def body(rank: int) -> str:
        with pytest.raises(AssertionError) as caught:
            send_more_than_expected(all_ranks())
        return str(caught.value)

    for rank, message in enumerate(run_ranks(body, 2)):
        assert message is not None
        head, *table = message.splitlines()
        assert head.startswith(f"Traffic on rank {rank} of 2, group ")
        assert table == [
            "operation   counter    got  expected",
            "all_gather  calls        1         2",
            "all_reduce  bytes    4,000         4",
            "barrier     calls        1         0",
        ]


def test_an_expected_operation_that_never_comes() -> None:
    def body(rank: int) -> None:
        with assert_traffic(all_ranks(), reduce_scatter=Expected(calls=1)):
            pass

    with pytest.raises(AssertionError, match=r"reduce_scatter +calls +0 +1"):
        run_ranks(body, 1)


def test_an_error_inside_comes_out_as_it_is() -> None:
    def body(rank: int) -> None:
        with assert_traffic(all_ranks(), all_reduce=Expected(calls=1)):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_ranks(body, 1)


def test_a_misspelt_operation_is_refused() -> None:
    def body(rank: int) -> None:
        with assert_traffic(all_ranks(), allgather=Expected(calls=0)):
            pass

    with pytest.raises(ConfigError, match="got allgather, expected names of operations"):
        run_ranks(body, 1)


def test_every_counted_operation_has_a_name_to_expect() -> None:
    def body(rank: int) -> set[str]:
        collectives = all_ranks()
        box = torch.zeros(2)
        collectives.all_reduce(box)
        collectives.reduce_scatter(torch.zeros(1), box)
        collectives.all_gather(box, torch.zeros(1))
        collectives.all_to_all(torch.zeros(2), box)
        collectives.broadcast(box)
        collectives.send(box, 1) if rank == 0 else collectives.recv(box, 0)
        collectives.barrier()
        collectives.all_gather_object(1)
        collectives.broadcast_object(1)
        return set(collectives.traffic)

    counted = run_ranks(body, 2)
    assert set().union(*(one or () for one in counted)) == set(OPERATIONS)
