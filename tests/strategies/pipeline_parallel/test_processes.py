"""On two processes, the same for all cases, pipelines train as a single device does."""

from collections.abc import Sequence

import pytest

from tests.mpirun import run_mpi
from tests.processes import run_processes
from tests.strategies.parity import (
    Run,
    assert_bitwise_equal,
    assert_parity,
    ignore_upstream_warnings,
    ignoring,
)
from tests.strategies.pipeline_parallel.test_pipeline_parallel import Pipelined, single_device

pytestmark = ignoring()

CASES = [
    Pipelined("layers", 2, "interleaved_1f1b"),
    Pipelined("layers", 2, "zbv", 5),
    Pipelined("gpt2", 2, "1f1b"),
]
SLOW = [
    Pipelined(model, 2, schedule)
    for model in ("gpt_8", "gpt2_8", "encoder_8", "llama_8", "mixtral_8")
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zbv", "dual_pipe_v")
]


def train_pipelines(cases: Sequence[Pipelined], backend: str = "gloo") -> list[Run]:
    """Train one case after the other on real processes."""
    ignore_upstream_warnings()
    return [case.run(backend) for case in cases]


@pytest.fixture(scope="module")
def runs() -> list[list[Run]]:
    """Each rank's runs of CASES."""
    return run_processes(train_pipelines, 2, cases=CASES)


@pytest.fixture(scope="module")
def slow_runs() -> list[list[Run]]:
    """Each rank's runs of SLOW."""
    return run_processes(train_pipelines, 2, cases=SLOW, timeout_seconds=900)


@pytest.fixture(scope="module", params=["shm", pytest.param("mpi", marks=pytest.mark.mpi)])
def runs_elsewhere(request: pytest.FixtureRequest) -> list[list[Run]]:
    """Each rank's runs of CASES over other backends."""
    start = run_mpi if request.param == "mpi" else run_processes
    return start(train_pipelines, 2, cases=CASES, backend=request.param)


def check(case: Pipelined, cases: list[Pipelined], runs: list[list[Run]]) -> None:
    first, second = (of_rank[cases.index(case)] for of_rank in runs)
    assert_parity(first, single_device(case.model))
    assert_bitwise_equal(first, second)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_a_single_device(case: Pipelined, runs: list[list[Run]]) -> None:
    check(case, CASES, runs)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_over_other_backends(case: Pipelined, runs_elsewhere: list[list[Run]]) -> None:
    check(case, CASES, runs_elsewhere)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_equals_a_single_device_everywhere(case: Pipelined, slow_runs: list[list[Run]]) -> None:
    check(case, SLOW, slow_runs)
