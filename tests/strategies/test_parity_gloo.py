"""On two processes over Gloo, every stage trains as a single device does.

All cases run one after the other in one pair of processes.
"""

from collections.abc import Sequence
from itertools import product

import pytest

from tests.processes import run_processes
from tests.strategies.models import MODELS
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

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS]

ALL = [
    Case(model=model, strategy=strategy, num_ranks=2)
    for model, strategy in product(MODELS, STRATEGIES)
]
QUICK = [case for case in ALL if case.model == "gpt"] + [
    Case(model="conv", strategy="zero1", num_ranks=2),
    Case(model="sync_conv", strategy="zero2", num_ranks=2),
    Case(model="lstm", strategy="zero3", num_ranks=2),
    Case(model="mixture", strategy="zero3", num_ranks=2),
]
SLOW = [case for case in ALL if case not in QUICK]
REPEATED = Case(model="gpt", strategy="zero3", num_ranks=2)


def _train(cases: Sequence[Case]) -> list[dict[Case, Run]]:
    """Return each rank's runs."""
    ranks = run_processes(train_cases, 2, timeout_seconds=110, cases=cases)
    return [dict(zip(cases, runs, strict=True)) for runs in ranks]


@pytest.fixture(scope="module")
def quick_runs() -> list[dict[Case, Run]]:
    return _train(QUICK)


@pytest.fixture(scope="module")
def slow_runs() -> list[dict[Case, Run]]:
    return _train(SLOW)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_equals_a_single_device(case: Case, quick_runs: list[dict[Case, Run]]) -> None:
    assert_parity(quick_runs[0][case], single_device(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_equals_a_single_device_everywhere(case: Case, slow_runs: list[dict[Case, Run]]) -> None:
    assert_parity(slow_runs[0][case], single_device(case))


@pytest.mark.parametrize("case", [case for case in QUICK if case.model == "gpt"], ids=str)
def test_the_ranks_end_with_the_same_bits(case: Case, quick_runs: list[dict[Case, Run]]) -> None:
    assert_bitwise_equal(quick_runs[0][case], quick_runs[1][case])


def test_the_same_seed_gives_the_same_bits(quick_runs: list[dict[Case, Run]]) -> None:
    (again,) = _train([REPEATED])[0].values()
    assert_bitwise_equal(again, quick_runs[0][REPEATED])
