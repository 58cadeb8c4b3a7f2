"""Under mpirun, every stage trains as a single device does."""

import pytest

from tests.mpirun import run_mpi
from tests.strategies.parity import (
    STRATEGIES,
    Case,
    Run,
    assert_bitwise_equal,
    assert_parity,
    ignoring,
    single_device,
    train_cases,
)

pytestmark = [pytest.mark.mpi, *ignoring()]

QUICK = [Case(model="gpt", strategy="zero3", num_ranks=2)]
ON_THREE = [
    Case(model="gpt", strategy="zero3", num_ranks=3),
    Case(model="sync_conv", strategy="zero2", num_ranks=3),
]
ON_TWO = [Case(model="gpt", strategy=strategy, num_ranks=2) for strategy in STRATEGIES]
IN_BF16 = [Case(model="lstm", strategy="zero3", num_ranks=3, precision="bf16-mixed")]
SLOW = pytest.mark.slow
Runs = list[tuple[Case, list[Run]]]


@pytest.fixture(
    scope="module",
    params=[QUICK, *(pytest.param(one, marks=SLOW) for one in (ON_THREE, ON_TWO, IN_BF16))],
    ids=["two ranks", "three ranks", "every stage", "bf16-mixed"],
)
def runs(request: pytest.FixtureRequest) -> Runs:
    """What each rank makes of each case, one after the other in one mpirun."""
    cases: list[Case] = request.param
    of_ranks = run_mpi(train_cases, cases[0].num_ranks, cases=cases, backend="mpi")
    return list(zip(cases, map(list, zip(*of_ranks, strict=True)), strict=True))


def test_equals_a_single_device(runs: Runs) -> None:
    for case, of_ranks in runs:
        tolerance = {"rtol": 2e-2, "atol": 2e-3} if case.precision == "bf16-mixed" else {}
        assert_parity(of_ranks[0], single_device(case), **tolerance)


def test_the_ranks_end_with_the_same_bits(runs: Runs) -> None:
    for _, (first, *others) in runs:
        for other in others:
            assert_bitwise_equal(other, first)
