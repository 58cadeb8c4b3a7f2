"""Under mpirun, every stage trains as a single device does.

All cases of a number of ranks run one after the other in one mpirun.
"""

from collections.abc import Callable
from functools import cache

import pytest

from tests.mpirun import run_mpi
from tests.strategies.parity import (
    STRATEGIES,
    UPSTREAM_WARNINGS,
    Case,
    Run,
    assert_bitwise_equal,
    assert_parity,
    single_device,
    train_cases,
)

pytestmark = [
    pytest.mark.mpi,
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS),
]

CASES = {
    2: [Case(model="gpt", strategy=strategy, num_ranks=2) for strategy in STRATEGIES],
    3: [
        Case(model="gpt", strategy="zero3", num_ranks=3),
        Case(model="sync_conv", strategy="zero2", num_ranks=3),
        Case(model="lstm", strategy="zero3", num_ranks=3, precision="bf16-mixed"),
    ],
}
ALL = [case for cases in CASES.values() for case in cases]
RunsOfRanks = Callable[[Case], list[Run]]


@pytest.fixture(scope="module")
def runs() -> RunsOfRanks:
    """What each rank makes of a case."""

    @cache
    def started(num_ranks: int) -> list[list[Run]]:
        return run_mpi(train_cases, num_ranks, cases=CASES[num_ranks], backend="mpi")

    def of_case(case: Case) -> list[Run]:
        index = CASES[case.num_ranks].index(case)
        return [of_rank[index] for of_rank in started(case.num_ranks)]

    return of_case


@pytest.mark.parametrize("case", ALL, ids=str)
def test_equals_a_single_device(case: Case, runs: RunsOfRanks) -> None:
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if case.precision == "bf16-mixed" else {}
    assert_parity(runs(case)[0], single_device(case), **tolerance)


@pytest.mark.parametrize("case", ALL, ids=str)
def test_the_ranks_end_with_the_same_bits(case: Case, runs: RunsOfRanks) -> None:
    first, *others = runs(case)
    for other in others:
        assert_bitwise_equal(other, first)
