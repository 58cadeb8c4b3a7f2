"""On shared memory pipelines train as a single device does; all cases in one pair of processes."""

import pytest

from tests.processes import run_processes
from tests.strategies.parity import Run, assert_bitwise_equal, assert_parity, ignoring
from tests.strategies.pipeline_parallel.test_gloo import CASES, train_pipelines
from tests.strategies.pipeline_parallel.test_pipeline_parallel import Pipelined, single_device

pytestmark = [pytest.mark.slow, *ignoring()]


@pytest.fixture(scope="module")
def runs() -> list[list[Run]]:
    """Each rank's runs of CASES."""
    return run_processes(train_pipelines, 2, cases=CASES, backend="shm")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_a_single_device(case: Pipelined, runs: list[list[Run]]) -> None:
    first, second = (of_rank[CASES.index(case)] for of_rank in runs)
    assert_parity(first, single_device(case.model))
    assert_bitwise_equal(first, second)
