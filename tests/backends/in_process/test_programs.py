"""Random programs of collectives give what a numpy model says, whole or with a fault in them."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lightning_shard.errors import CollectiveMismatchError, DeadlockError, RankFailedError
from lightning_shard.testing import Fault, run_ranks
from tests.backends.in_process.numpy_model import Step, expected, num_operations, partners
from tests.backends.in_process.programs import Program, RankRun, other_step, programs

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
_few = settings(max_examples=60, derandomize=True, suppress_health_check=_CHECKS)
_many = settings(max_examples=1500, suppress_health_check=_CHECKS, print_blob=True)


def same(result: Any, model: Any) -> None:
    if not isinstance(result, torch.Tensor):
        assert result == model
        return
    assert tuple(result.shape) == model.shape
    if result.is_floating_point() and result.dtype not in (torch.float32, torch.float64):
        result = result.float()
    np.testing.assert_allclose(result.numpy(), model, rtol=1e-6)


def check_step(step: Step, rank: int, results: dict[int, Any]) -> None:
    model, got = expected(step)[rank], results[step.number]
    if isinstance(got, Exception):
        raise AssertionError(f"{step} on rank {rank}") from got
    for result, wanted in zip(got, model, strict=True):
        same(result, wanted)


def check_run(program: Program, rank: int, results: dict[int, Any]) -> None:
    for step in program.steps:
        if rank in step.ranks:
            check_step(step, rank, results)


def check_program(program: Program) -> None:
    runs = run_ranks(lambda rank: RankRun(program, rank).run().results, program.num_ranks)
    for rank, results in enumerate(runs):
        assert results is not None
        check_run(program, rank, results)


def locate(program: Program, fault: Fault) -> tuple[int, int]:
    """Return the step that a fault strikes and how many of its operations come before."""
    left = fault.at_collective
    for step in program.steps:
        count = num_operations(step, fault.rank)
        if left <= count:
            return step.number, left - 1
        left -= count
    return len(program.steps), 0


def depends(step: Step, rank: int, other: int, done: int) -> bool:
    """Say whether `rank` needs what `other` did not do after `done` operations of a step."""
    places = partners(step)
    if not {rank, other} <= set(step.ranks):
        return False
    mine, others = step.ranks.index(rank), step.ranks.index(other)
    if mine not in places or others not in places:
        return False
    if step.kind != "ring":
        return True
    size = len(step.ranks)
    sends_to, gets_from = (others + 1) % size == mine, (others - 1) % size == mine
    return (sends_to and done < 1) or (gets_from and done < 2)


def check_drop(program: Program, fault: Fault) -> None:
    """Check each step: it is full, or it needed the dropped rank and says so."""
    struck, done = locate(program, fault)

    def fn(rank: int) -> dict[int, Any]:
        return RankRun(program, rank, RankFailedError).run().results

    runs = run_ranks(fn, program.num_ranks, faults=[fault])
    for rank, results in enumerate(runs):
        if results is None:
            assert rank == fault.rank
            assert struck < len(program.steps)
            continue
        for step in program.steps:
            if rank not in step.ranks:
                continue
            late = step.number >= struck
            before = done if step.number == struck else 0
            if late and rank != fault.rank and depends(step, rank, fault.rank, before):
                assert isinstance(results[step.number], RankFailedError), (step, rank)
                assert f"rank {fault.rank} is gone" in str(results[step.number])
            elif late and step.kind == "ring" and isinstance(results[step.number], RankFailedError):
                assert fault.rank in step.ranks  # a neighbour had raised before it posted its half
            else:
                check_step(step, rank, results)


def check_failure(program: Program, fault: Fault) -> None:
    """Check that the caller sees the failed rank's error, and who needs that rank a follow-up."""
    struck, done = locate(program, fault)
    seen: dict[int, BaseException] = {}
    runs: dict[int, RankRun] = {}

    def fn(rank: int) -> None:
        try:
            runs[rank] = RankRun(program, rank)
            runs[rank].run()
        except BaseException as error:
            seen[rank] = error
            raise

    if struck == len(program.steps):
        run_ranks(fn, program.num_ranks, faults=[fault])
        assert not seen
    else:
        with pytest.raises(RankFailedError, match=f"Rank {fault.rank} fails on purpose") as caught:
            run_ranks(fn, program.num_ranks, faults=[fault])
        assert caught.value is seen[fault.rank]
    for rank, run in runs.items():
        if rank not in seen:
            check_run(program, rank, run.results)
        elif rank != fault.rank:
            assert type(seen[rank]) is RankFailedError
            assert seen[rank].__cause__ is seen[fault.rank]
    for step in program.steps[struck:]:
        before = done if step.number == struck else 0
        for rank in step.ranks:
            if rank != fault.rank and depends(step, rank, fault.rank, before):
                assert rank in seen


def check_mismatch(program: Program, number: int, place: int) -> None:
    """Check that a rank which makes another call than its peers is found out."""
    step = program.steps[number]
    rank = step.ranks[place]

    def fn(this: int) -> None:
        RankRun(program, this).run(
            lambda s: other_step(s) if this == rank and s.number == number else s
        )

    with pytest.raises((CollectiveMismatchError, DeadlockError)):
        run_ranks(fn, program.num_ranks)


def faults(program: Program, kind: Any, seconds: float = 0.0) -> st.SearchStrategy[Fault]:
    return st.builds(
        Fault,
        st.integers(0, program.num_ranks - 1),
        st.integers(1, 12),
        st.just(kind),
        st.just(seconds),
    )


def mismatches(program: Program) -> st.SearchStrategy[tuple[int, int]]:
    places = [
        (step.number, place)
        for step in program.steps
        for place in partners(step)
        if len(step.ranks) > 1
    ]
    return st.sampled_from(places) if places else st.nothing()


def draw_and_check(drawn: st.DataObject, what: str) -> None:
    program = drawn.draw(programs())
    if what == "whole":
        check_program(program)
    elif what == "mismatch":
        assume(any(len(step.ranks) > 1 for step in program.steps))
        check_mismatch(program, *drawn.draw(mismatches(program)))
    else:
        fault = drawn.draw(faults(program, what, 0.001 if what == "delay" else 0.0))
        if what == "delay":
            runs = run_ranks(
                lambda rank: RankRun(program, rank).run().results, program.num_ranks, faults=[fault]
            )
            for rank, results in enumerate(runs):
                assert results is not None
                check_run(program, rank, results)
        else:
            (check_drop if what == "drop" else check_failure)(program, fault)


WHATS = ["whole", "delay", "fail", "drop", "mismatch"]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("what", WHATS)
def test_random_programs(what: str) -> None:
    _few(given(st.data())(lambda drawn: draw_and_check(drawn, what)))()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", WHATS)
def test_many_random_programs(what: str) -> None:
    _many(given(st.data())(lambda drawn: draw_and_check(drawn, what)))()
