"""What GPUs will be asked to do, on CPU ranks over Gloo: so that it runs when GPUs come."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import __main__ as command
from tests.gpu.schemes import NUM_STEPS, SCHEMES, train_precisely, train_scheme
from tests.processes import REPOSITORY, run_processes
from tests.strategies.parity import assert_parity, ignoring

pytestmark = ignoring()


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_trains_over_gloo_as_in_process(name: str) -> None:
    num_ranks = SCHEMES[name].sizes()[1 if SCHEMES[name].divisor == 1 else 0]
    arguments = {"name": name, "num_ranks": num_ranks, "backend": "gloo"}
    found = run_processes(train_scheme, num_ranks, **arguments)
    expected = train_scheme(name, num_ranks, "in_process")
    early = SCHEMES[name].clips_early
    assert_parity(found[0], expected, rtol=1e-9, atol=1e-12, num_steps=NUM_STEPS, clips_early=early)


@pytest.mark.slow
def test_a_stage_trains_as_a_single_device() -> None:
    arguments = {"strategy": "zero2_gloo", "precision": "32-true", "num_ranks": 2}
    found = run_processes(train_precisely, 2, **arguments, accelerator="cpu")
    expected = train_precisely(None, "32-true", 1, "cpu")
    assert_parity(found[0], expected, num_steps=NUM_STEPS)


def test_every_file_with_tests_for_gpus_is_run() -> None:
    marked = {
        path.relative_to(REPOSITORY)
        for path in (REPOSITORY / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text() and path != Path(__file__)
    }
    places = [Path(place) for place in command.PLACES]
    missing = [path for path in marked if not any(map(path.is_relative_to, places))]
    assert missing == []


@pytest.mark.slow
def test_without_a_gpu_every_test_is_named_and_the_status_is_1() -> None:
    hidden = [sys.executable, "-m", "tests.gpu"]
    run = subprocess.run(hidden, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if "GPU 0:" in run.stdout:
        return  # they ran
    assert run.returncode == 1
    assert "NONE of these tests was run" in run.stdout
    assert "test_conformance[nccl-" in run.stdout
    assert "test_gpus_train_as_cpu_ranks_do[zero3-8]" in run.stdout
