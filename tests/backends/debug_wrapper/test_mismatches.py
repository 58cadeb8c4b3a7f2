"""Ranks that call different things: every rank is told, and by whom."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends.debug_wrapper import DebugExchange
from tests.backends.debug_wrapper.programs import debug_world, outcome
from tests.processes import run_processes


def all_reduce_or_broadcast(rank: int, _: DebugExchange) -> None:
    if rank == 1:
        dist.broadcast(torch.ones(2), src=0)
    dist.all_reduce(torch.ones(2))


def other_shapes(rank: int, _: DebugExchange) -> None:
    dist.all_reduce(torch.ones(2 + rank))


def other_dtypes(rank: int, _: DebugExchange) -> None:
    dist.all_reduce(torch.ones(1, dtype=[torch.int64, torch.float64][rank]))


def other_reductions(rank: int, _: DebugExchange) -> None:
    dist.all_reduce(torch.ones(1), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank])


def other_roots(rank: int, _: DebugExchange) -> None:
    dist.broadcast(torch.ones(1), src=rank)


def splits_that_do_not_fit(rank: int, _: DebugExchange) -> None:
    dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 3], [2, 2])


def message_of_another_size(rank: int, _: DebugExchange) -> None:
    if rank == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(torch.ones(2), 0)


def message_from_anybody_of_another_size(rank: int, _: DebugExchange) -> None:
    if rank == 0:
        dist.send(torch.ones(4), 1)
    else:
        dist.recv(torch.ones(2))


def messages_in_a_batch(rank: int, _: DebugExchange) -> None:
    peer = 1 - rank
    ops = [
        dist.P2POp(dist.isend, torch.ones(3), peer),
        dist.P2POp(dist.irecv, torch.ones(3 + rank), peer),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    dist.barrier()


def facade_against_facade(rank: int, collectives: DebugExchange) -> None:
    if rank == 0:
        collectives.reduce_scatter(torch.ones(2), torch.ones(4))
    else:
        collectives.all_reduce(torch.ones(4))


def facade_against_user(rank: int, collectives: DebugExchange) -> None:
    if rank == 0:
        collectives.all_gather(torch.ones(4), torch.ones(2))
    else:
        dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))


def duplicate_of_the_facade(rank: int, collectives: DebugExchange) -> None:
    collectives.duplicate().all_reduce(torch.ones(1 + rank))


def functional(rank: int, _: DebugExchange) -> None:
    from torch.distributed import _functional_collectives as functional_collectives

    group = dist.group.WORLD
    functional_collectives.all_reduce(torch.ones(1 + rank), "sum", group).trigger_wait()


def subgroup(rank: int, _: DebugExchange) -> None:
    dist.all_reduce(torch.ones(1 + rank), group=dist.new_group([0, 1]))


CASES = [
    (all_reduce_or_broadcast, "broadcast(float32 (2,), root 0)", "all_reduce(SUM, float32 (2,))"),
    (other_shapes, "float32 (3,)", "float32 (2,)"),
    (other_dtypes, "float64 (1,)", "int64 (1,)"),
    (other_reductions, "MAX", "SUM"),
    (other_roots, "root 1", "root 0"),
    (splits_that_do_not_fit, "gives float32 (2,)", "has room for float32 (1,)"),
    (message_of_another_size, "recv(float32 (2,), peer 0)", "send(float32 (4,), peer 1)"),
    (message_from_anybody_of_another_size, "recv(float32 (2,))", "send(float32 (4,), peer 1)"),
    (messages_in_a_batch, "recv(float32 (4,), peer 0)", "send(float32 (3,), peer 1)"),
    (facade_against_facade, "all_reduce(SUM, float32 (4,))", "reduce_scatter(SUM, float32 (4,))"),
    (facade_against_user, "all_gather(float32 (2,))", "all_gather(float32 (2,))"),
    (duplicate_of_the_facade, "float32 (2,)", "float32 (1,)"),
    (functional, "float32 (2,)", "float32 (1,)"),
    (subgroup, "float32 (2,)", "float32 (1,)"),
]


def meet_and_disagree() -> list[tuple[str, str]]:
    results = []
    for case, _, _ in CASES:
        with debug_world(case.__name__) as collectives:
            results.append(outcome(partial(case, collectives.rank, collectives)))
    return results


@pytest.fixture(scope="module")
def results() -> list[list[tuple[str, str]]]:
    """What each rank raised in each case; all cases run in one pair of processes."""
    return run_processes(meet_and_disagree, 2)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("case", CASES, ids=[case[0].__name__ for case in CASES])
def test_a_mismatch_is_raised_on_every_rank(
    case: tuple[Any, str, str], results: list[list[tuple[str, str]]]
) -> None:
    _, got, expected = case
    for rank, result in enumerate(results):
        kind, text = result[CASES.index(case)]
        assert kind == "CollectiveMismatchError", text
        assert f"This is rank {rank}, in " in text
        assert got in text
        assert expected in text
        assert text.count(__file__) >= 2
