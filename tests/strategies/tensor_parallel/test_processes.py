"""On processes, tensor parallel trains as a single device does, with data parallel, too."""

from typing import Any

import pytest

from lightning_shard import TensorParallelStrategy
from tests.mpirun import run_mpi
from tests.processes import run_processes
from tests.strategies.parity import (
    UPSTREAM_WARNINGS,
    Case,
    Run,
    assert_bitwise_equal,
    assert_parity,
    build,
    ignore_upstream_warnings,
    single_device,
    train,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),  # ranks that wait take turns on few cores
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS),
]

RUNS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, and the strategy's options
    "gpt": (4, {"tensor_parallel_size": 2, "zero_stage": 3}),
    "llama": (2, {"sequence_parallel": True}),
}


def train_over(backend: str, model: str) -> Run:
    """Run in each rank."""
    ignore_upstream_warnings()
    num_ranks, options = RUNS[model]
    strategy = TensorParallelStrategy(backend=backend, **options)
    return train(build(model), strategy=strategy, devices=num_ranks)


@pytest.mark.parametrize("backend", ["shm", pytest.param("mpi", marks=pytest.mark.mpi)])
@pytest.mark.parametrize("model", RUNS)
def test_equals_a_single_device_and_the_ranks_end_with_the_same_bits(
    model: str, backend: str
) -> None:
    start = run_mpi if backend == "mpi" else run_processes
    first, *others = start(
        train_over, RUNS[model][0], timeout_seconds=280, backend=backend, model=model
    )
    assert_parity(first, single_device(Case(model=model, strategy="", num_ranks=1)))
    for other in others:
        assert_bitwise_equal(other, first)
