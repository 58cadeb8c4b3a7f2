"""What a checked group is, beside telling of mismatches: ranks that agree notice nothing."""

import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_shard.backends.calls import Call, message_key
from lightning_shard.backends.debug_wrapper import DebugExchange, Fingerprint, find_misfit
from lightning_shard.core.call_site import CallSite
from lightning_shard.errors import CollectiveMismatchError
from tests.backends.debug_wrapper.programs import debug_world, meeting_place, outcome
from tests.processes import rank_and_world_size, run_processes


def wait_for_peers(name: str) -> None:
    """Meet through the store alone."""
    store = meeting_place()
    store.set(f"{name}/{dist.get_rank()}", "")
    store.wait([f"{name}/{rank}" for rank in range(dist.get_world_size())])


def missing_rank() -> tuple[str, str]:
    with debug_world("missing", timeout_seconds=1) as collectives:
        dist.barrier()
        result = ("", "")
        if collectives.rank == 0:
            result = outcome(lambda: dist.all_reduce(torch.ones(3)))
        wait_for_peers("missing rank")
    return result


def missing_receiver() -> tuple[str, str]:
    with debug_world("receiver", timeout_seconds=1) as collectives:
        result = ("", "")
        if collectives.rank == 0:
            result = outcome(lambda: dist.send(torch.ones(3), 1))
        wait_for_peers("missing receiver")
    return result


def groups_in_different_order() -> tuple[str, str]:
    with debug_world("orders", timeout_seconds=1) as collectives:
        one, other = (dist.new_group(timeout=timedelta(seconds=1)) for _ in range(2))
        groups = (one, other) if collectives.rank else (other, one)
        result = outcome(
            lambda: [dist.all_reduce(torch.ones(1), group=g, async_op=True) for g in groups]
        )
        wait_for_peers("orders")
    return result


def keys_left_in_the_store() -> list[int]:
    store, counts = meeting_place(), []
    with debug_world("keys") as collectives:
        peer = 1 - collectives.rank
        for _ in range(3):
            for _ in range(20):
                dist.all_reduce(torch.ones(1))
                collectives.reduce_scatter(torch.ones(1), torch.ones(2))
                ops = [
                    dist.P2POp(dist.isend, torch.ones(1), peer),
                    dist.P2POp(dist.irecv, torch.ones(1), peer),
                ]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
            wait_for_peers(f"keys{len(counts)}")
            counts.append(store.num_keys())
            wait_for_peers(f"counted{len(counts)}")
    return counts


def group_made_again_after_a_mismatch() -> list[float]:
    with debug_world("again") as collectives, suppress(CollectiveMismatchError):
        dist.all_reduce(torch.ones(1 + collectives.rank))
    with debug_world("again"):
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
    return list(tensor.tolist())


def group_made_again_by_one_rank_first() -> list[float]:
    sums = []
    for turn in range(4):
        if rank_and_world_size()[0] == turn % 2:
            time.sleep(0.2)  # meanwhile the other finds what the last group has left in the store
        with debug_world("late"):
            tensor = torch.ones(())
            dist.all_reduce(tensor)
            sums.append(tensor.item())
    return sums


def told_again_in_the_same_group() -> list[str]:
    with debug_world("swallowed") as collectives:
        calls = [
            lambda: dist.all_reduce(torch.ones(1 + collectives.rank)),
            dist.barrier,
            lambda: dist.send(torch.ones(1), 1 - collectives.rank),
        ]
        return [outcome(call)[0] for call in calls]


def branch_by_rank() -> list[str]:
    with debug_world("branch") as collectives, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            if collectives.rank == 0:
                dist.broadcast(torch.ones(1), src=0)
            else:
                dist.broadcast(torch.zeros(1), src=0)
    return [str(one.message) for one in caught]


def two_threads_at_once() -> tuple[str, str]:
    """Rank 0's other thread calls while its first one waits for rank 1."""
    with debug_world("threads", timeout_seconds=1) as collectives:
        result: list[tuple[str, str]] = []
        if collectives.rank == 0:
            turn = collectives.group.comparer.turn()  # type: ignore[attr-defined]
            call: Callable[[], Any] = lambda: dist.all_reduce(torch.ones(3))  # noqa: E731
            other = threading.Thread(target=lambda: result.append(outcome(call)), name="other")
            with turn:
                other.start()
                while not collectives.group.comparer._overlap:  # type: ignore[attr-defined]
                    pass
            other.join()
        wait_for_peers("threads")
    return result[0] if result else ("", "")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def step(trained: nn.Module, rank: int) -> None:
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        trained(torch.arange(8.0).view(2, 4) / 8 + rank).square().mean().backward()
        optimizer.step()


def torch_engines() -> tuple[list[Tensor], list[Tensor], Tensor]:
    with debug_world("engines") as collectives:
        replicated = nn.parallel.DistributedDataParallel(model())
        step(replicated, collectives.rank)
        mesh = init_device_mesh("cpu", (2,))
        sharded = model()
        for part in (sharded[0], sharded[2], sharded):  # type: ignore[index]
            fully_shard(part, mesh=mesh)
        step(sharded, collectives.rank)
        matrix = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
        product = (matrix @ matrix.redistribute(mesh, [Shard(1)])).full_tensor()
        return (
            [p.detach().clone() for p in replicated.parameters()],
            [p.full_tensor().detach() for p in sharded.parameters()],
            product,
        )


PROGRAMS: list[Callable[[], Any]] = [
    missing_rank,
    missing_receiver,
    groups_in_different_order,
    keys_left_in_the_store,
    group_made_again_after_a_mismatch,
    group_made_again_by_one_rank_first,
    told_again_in_the_same_group,
    branch_by_rank,
    two_threads_at_once,
    torch_engines,
]


def run_all() -> dict[str, Any]:
    warnings.filterwarnings("ignore", category=FutureWarning)
    return {program.__name__: program() for program in PROGRAMS}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What each program returned on each rank, in one pair of processes."""
    return run_processes(run_all, 2)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(ranks: list[dict[str, Any]]) -> None:
    kind, text = ranks[0]["missing_rank"]
    assert kind == "RankFailedError"
    assert "Rank 0 has waited 0:00:01 in all_reduce(SUM, float32 (3,)), number 2 of group" in text
    assert "rank 1: its last one was barrier() at " in text
    assert text.count(__file__) == 2


@pytest.mark.slow
def test_a_receiver_that_does_not_come_is_named(ranks: list[dict[str, Any]]) -> None:
    kind, text = ranks[0]["missing_receiver"]
    assert kind == "RankFailedError"
    assert "in send(float32 (3,), peer 1)" in text
    assert "rank 1 has not come to the other end of it" in text


@pytest.mark.slow
def test_groups_used_in_different_order_are_told_of(ranks: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(ranks):
        kind, text = result["groups_in_different_order"]
        assert kind == "RankFailedError"
        assert f"rank {1 - rank}: has not called anything in this group" in text
        assert "waits in another group" in text


@pytest.mark.slow
def test_the_store_does_not_grow(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        counts = result["keys_left_in_the_store"]
        assert counts[2] - counts[1] <= 6, counts  # the meetings in between; of 80 operations, none


@pytest.mark.slow
def test_a_group_of_the_same_name_starts_afresh(ranks: list[dict[str, Any]]) -> None:
    assert [r["group_made_again_after_a_mismatch"] for r in ranks] == [[2.0, 2.0]] * 2


@pytest.mark.slow
def test_a_rank_that_is_early_waits_for_the_addresses_of_its_group(
    ranks: list[dict[str, Any]],
) -> None:
    """A rank that was early called the addresses of the last group."""
    assert [r["group_made_again_by_one_rank_first"] for r in ranks] == [[2.0] * 4] * 2


def test_a_rank_that_swallows_the_error_is_told_again(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["told_again_in_the_same_group"] == ["CollectiveMismatchError"] * 3


def test_a_branch_by_rank_warns_once_and_names_both_places(ranks: list[dict[str, Any]]) -> None:
    (text,) = ranks[0]["branch_by_rank"]
    assert "called its operation number 1, broadcast(float32 (1,), root 0), from different" in text
    assert text.count(__file__) == 2
    assert ranks[1]["branch_by_rank"] == []


def test_threads_that_call_at_the_same_time_are_named(ranks: list[dict[str, Any]]) -> None:
    kind, text = ranks[0]["two_threads_at_once"]
    assert kind == "RankFailedError"
    assert "Threads 'MainThread' and 'other' of rank 0 called at the same time" in text


def test_torch_engines_run_on_it(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        replicated, sharded, product = result["torch_engines"]
        torch.testing.assert_close(replicated, sharded)
        assert not torch.equal(replicated[0], next(model().parameters()))
        matrix = torch.arange(16.0).view(4, 4)
        torch.testing.assert_close(product, matrix @ matrix)


def test_the_facade_compares_only_on_checked_groups() -> None:
    from lightning_shard.backends.debug_wrapper import exchange_collectives
    from lightning_shard.backends.exchange import ExchangeCollectives
    from lightning_shard.testing import run_ranks

    def facade(rank: int) -> type:
        assert dist.group.WORLD is not None
        return type(exchange_collectives(dist.group.WORLD))

    assert run_ranks(facade, 2) == [ExchangeCollectives] * 2
    assert issubclass(DebugExchange, ExchangeCollectives)


def fingerprint(op: str, rank: int, inputs: list[int], outputs: list[int], **options: Any) -> Any:
    """Return it as a peer reads it, of a call with tensors of so many elements."""
    given, room = ([torch.empty(numel) for numel in sizes] for sizes in (inputs, outputs))
    agreed = options.pop("agreed", (op,))
    call = Call(op, rank, given, room, agreed, CallSite("a.py", 3), room, **options)
    return Fingerprint.decode(Fingerprint.of(call, 2).encode().encode())


def test_it_survives_the_journey() -> None:
    mine = fingerprint("broadcast", 0, [2], [], root=0)
    assert mine == Fingerprint(
        agreed="('broadcast',)", operation="broadcast(float32 (2,), root 0)", site="a.py:3"
    )


def test_the_first_rank_says_what_is_expected() -> None:
    calls = [fingerprint(op, 0, [1], []) for op in ("barrier", "barrier", "all_reduce")]
    assert find_misfit(calls) == (2, 0, "")
    assert find_misfit(calls[:2]) is None


def test_uneven_parts_are_compared_in_pairs() -> None:
    fitting = [
        fingerprint("all_to_all", 0, [1, 2], [1, 3]),
        fingerprint("all_to_all", 1, [3, 4], [2, 4]),
    ]
    assert find_misfit(fitting) is None
    short = [fitting[0], fingerprint("all_to_all", 1, [3, 4], [1, 4])]
    assert find_misfit(short) == (
        0,
        1,
        "rank 0 of the group gives float32 (2,), but rank 1 of the group has room for "
        "float32 (1,) there",
    )


def test_gather_and_scatter_are_compared_at_the_root() -> None:
    gather = [
        fingerprint("gather", 0, [2], [2, 3], root=0),
        fingerprint("gather", 1, [2], [], root=0),
    ]
    scatter = [
        fingerprint("scatter", 0, [2, 3], [2], root=0),
        fingerprint("scatter", 1, [], [2], root=0),
    ]
    misfit = find_misfit(gather)
    assert misfit is not None
    assert misfit[:2] == (1, 0)
    misfit = find_misfit(scatter)
    assert misfit is not None
    assert misfit[:2] == (0, 1)


def test_a_message_is_compared_by_its_tensors_alone() -> None:
    sent = fingerprint("send", 0, [2], [], agreed=("send", 1), root=1, tag=0)
    received = fingerprint("recv", 1, [], [2], agreed=("recv", 0), root=0, tag=0)
    assert sent.agreed == received.agreed == repr(message_key([torch.empty(2)]))


def test_another_thread_is_named() -> None:
    sites: list[str] = []
    thread = threading.Thread(
        target=lambda: sites.append(fingerprint("barrier", 0, [], []).site), name="loader"
    )
    thread.start()
    thread.join()
    assert sites == ["a.py:3 in thread 'loader'"]
