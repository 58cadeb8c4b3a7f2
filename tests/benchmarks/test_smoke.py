"""The benchmarks on tiny models: every contender trains, is weighed and is reported."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.collectives import OPERATIONS
from tests.benchmarks.entries import CONTENDERS

REPOSITORY = Path(__file__).parents[2]


def run_module(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_benchmark(*arguments: str) -> str:
    one_round = ("--model=tiny", "--rounds=1", "--steps=1")
    return run_module("tests.benchmarks", *one_round, *arguments)


@pytest.mark.slow
@pytest.mark.benchmark
@pytest.mark.timeout(240)
def test_every_contender_is_timed_and_the_losses_agree(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    names = [name for name, entry in CONTENDERS.items() if not entry.needs_mpi]
    output = run_benchmark(
        "--no-memory", f"--json={path}", f"--plot={tmp_path / 'plot.png'}", "--only", *names
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
    output = run_benchmark("--no-memory", "--only", *names)
    assert "Losses agree with torch DDP's." in output
    assert "zero3 over MPI" in output


@pytest.mark.slow
@pytest.mark.benchmark
@pytest.mark.timeout(240)
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from Linux's /proc")
def test_memory_is_weighed(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    run_benchmark(f"--json={path}", "--only", "ddp", "zero1")
    contenders = json.loads(path.read_text())["contenders"]
    states = {name: contenders[name]["footprint"]["state_bytes"] for name in ("ddp", "zero1")}
    assert states["zero1"] == pytest.approx(states["ddp"] / 2, rel=0.02)


@pytest.mark.slow
@pytest.mark.benchmark
@pytest.mark.timeout(240)
def test_a_profile_shows_phases_operators_and_functions() -> None:
    output = run_benchmark("--profile", "zero1", "ddp")
    assert all(text in output for text in ("optimizer", "aten::mm", "run_backward"))


@pytest.mark.slow
@pytest.mark.benchmark
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("module", "contenders"),
    [
        ("tensor_parallel", ["ours", "torch", "hand", "hand_again"]),
        ("long_contexts", ["ours", "hand", "hand_again"]),
        ("experts", ["ours", "ours_zero3", "ddp", "ddp_again"]),
    ],
)
def test_contenders_are_timed_and_their_losses_agree(module: str, contenders: list[str]) -> None:
    tiny = ("--sizes=tiny", "--rounds=1", "--steps=1")
    output = run_module(f"tests.benchmarks.{module}", *tiny)
    for name in contenders:
        assert re.search(rf"│ {name} +│ +[0-9.]+ │", output), output


@pytest.mark.slow
@pytest.mark.benchmark
@pytest.mark.timeout(240)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_pipelines_are_timed_and_idle_shares_are_taken(schedule: str) -> None:
    options = ("--sizes=narrow", f"--schedules={schedule}", "--microbatches=4", "--rounds=2")
    output = run_module("tests.benchmarks.pipeline", *options)
    rows = [line.split("│")[1].strip() for line in output.splitlines() if "│" in line]
    assert rows == ["ours", "lightning", "torch", "torch_again", "0", "1", "mean"]
    assert "20.0%" in output  # (p - 1) / (m + p - 1)


@pytest.mark.slow
@pytest.mark.benchmark
def test_every_operation_has_a_line() -> None:
    output = run_module("tests.benchmarks.collectives", "--megabytes=1", "--rounds=2")
    assert all(operation in output for operation in OPERATIONS)


@pytest.mark.slow
@pytest.mark.benchmark
def test_a_short_run_with_a_slow_rank() -> None:
    short = ["--ranks=2", "--bound=1", "--step=0.001", "--rounds=2", "--steps=5"]
    output = run_module("tests.benchmarks.asynchronous", *short)
    assert "in 16 gradients applied to each shard" in output
