"""The benchmark of collectives on a small tensor, and what it counts."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.collectives import OPERATIONS, loopback_bytes, optimal_bytes

REPOSITORY = Path(__file__).parents[2]


def test_theory_is_a_ring_over_all_ranks() -> None:
    assert [optimal_bytes(operation, 64) for operation in OPERATIONS] == [64, 64, 128]


@pytest.mark.skipif(sys.platform != "linux", reason="bytes are read from Linux's /proc")
def test_the_loopback_counter_is_read() -> None:
    assert loopback_bytes() >= 0


@pytest.mark.slow
@pytest.mark.benchmark
def test_every_operation_has_a_line() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.collectives", "--megabytes=1", "--rounds=2"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(operation in done.stdout for operation in OPERATIONS)
