"""On two processes over Gloo, the same for all cases, every stage trains as one device does."""

from itertools import product

import pytest

from tests.processes import run_processes
from tests.strategies.models import MODELS
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

pytestmark = ignoring()

ALL = [
    Case(model=model, strategy=strategy, num_ranks=2)
    for model, strategy in product(MODELS, STRATEGIES)
]
QUICK = [
    Case(model="gpt", strategy="shard_ddp", num_ranks=2),
    Case(model="gpt", strategy="zero3", num_ranks=2),
    Case(model="conv", strategy="zero1", num_ranks=2),
    Case(model="sync_conv", strategy="zero2", num_ranks=2),
]
SLOW = [case for case in ALL if case not in QUICK]
REPEATED = [case for case in QUICK if case.strategy == "zero3"]


@pytest.fixture(scope="module")
def quick_runs() -> list[list[Run]]:
    """Each rank's runs of QUICK, then of REPEATED, in interpreters of their own."""
    return run_processes(train_cases, 2, cases=[*QUICK, *REPEATED], fresh=True)


@pytest.fixture(scope="module")
def slow_runs() -> list[list[Run]]:
    """Each rank's runs of SLOW."""
    return run_processes(train_cases, 2, cases=SLOW)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_equals_a_single_device(case: Case, quick_runs: list[list[Run]]) -> None:
    assert_parity(quick_runs[0][QUICK.index(case)], single_device(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_equals_a_single_device_everywhere(case: Case, slow_runs: list[list[Run]]) -> None:
    assert_parity(slow_runs[0][SLOW.index(case)], single_device(case))


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_the_ranks_end_with_the_same_bits(case: Case, quick_runs: list[list[Run]]) -> None:
    index = QUICK.index(case)
    assert_bitwise_equal(quick_runs[0][index], quick_runs[1][index])


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_the_same_seed_gives_the_same_bits(case: Case, quick_runs: list[list[Run]]) -> None:
    again = quick_runs[0][len(QUICK) + REPEATED.index(case)]
    assert_bitwise_equal(again, quick_runs[0][QUICK.index(case)])
