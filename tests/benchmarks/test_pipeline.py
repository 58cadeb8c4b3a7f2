"""The benchmark of pipelines: every contender trains the same, and both tables come out."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.benchmark
@pytest.mark.timeout(240)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_every_contender_is_timed_and_idle_shares_are_taken(schedule: str) -> None:
    options = ["--sizes=narrow", f"--schedules={schedule}", "--microbatches=4"]
    command = [sys.executable, "-m", "tests.benchmarks.pipeline", *options, "--rounds=2"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("│")[1].strip() for line in done.stdout.splitlines() if "│" in line]
    assert rows == ["ours", "lightning", "torch", "torch_again", "0", "1", "mean"]
    assert "20.0%" in done.stdout  # (p - 1) / (m + p - 1)
