"""The whole benchmark on a tiny model: every contender trains, is weighed and is reported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.entries import CONTENDERS

REPOSITORY = Path(__file__).parents[2]


def run_benchmark(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.benchmarks", "--model", "tiny", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.benchmark
@pytest.mark.timeout(240)
def test_every_contender_is_timed_and_the_losses_agree(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    names = [name for name, entry in CONTENDERS.items() if not entry.needs_mpi]
    output = run_benchmark(
        "--rounds=1",
        "--steps=1",
        "--no-memory",
        f"--json={path}",
        f"--plot={tmp_path / 'plot.png'}",
        "--only",
        *names,
    )
    assert (tmp_path / "plot.png").stat().st_size > 0
    results = json.loads(path.read_text())
    assert list(results["contenders"]) == names
    assert len(results["targets"]) == 6
    assert "Losses agree with torch DDP's." in output


@pytest.mark.slow
@pytest.mark.benchmark
@pytest.mark.mpi
@pytest.mark.timeout(240)
def test_ranks_over_mpi_are_timed_beside_others() -> None:
    names = ("shard_ddp_mpi", "zero3_mpi", "zero3", "zero3_shm")
    output = run_benchmark("--rounds=1", "--steps=1", "--no-memory", "--only", *names)
    assert "Losses agree with torch DDP's." in output
    assert "zero3 over MPI" in output


@pytest.mark.slow
@pytest.mark.benchmark
@pytest.mark.timeout(240)
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from Linux's /proc")
def test_memory_is_weighed(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    run_benchmark("--rounds=1", "--steps=1", f"--json={path}", "--only", "ddp", "zero1")
    contenders = json.loads(path.read_text())["contenders"]
    states = {name: contenders[name]["footprint"]["state_bytes"] for name in ("ddp", "zero1")}
    assert states["zero1"] == pytest.approx(states["ddp"] / 2, rel=0.02)


@pytest.mark.slow
@pytest.mark.benchmark
@pytest.mark.timeout(240)
def test_a_profile_shows_phases_operators_and_functions() -> None:
    output = run_benchmark("--rounds=1", "--steps=1", "--profile", "zero1", "ddp")
    assert all(text in output for text in ("optimizer", "aten::mm", "run_backward"))
