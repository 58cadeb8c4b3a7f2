"""The benchmarks of sequences in parts and of experts on their ranks, on tiny models."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.benchmark
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("module", "contenders"),
    [
        ("long_contexts", ["ours", "hand", "hand_again"]),
        ("experts", ["ours", "ours_zero3", "ddp", "ddp_again"]),
    ],
)
def test_contenders_are_timed_and_their_losses_agree(module: str, contenders: list[str]) -> None:
    command = [sys.executable, "-m", f"tests.benchmarks.{module}", "--sizes", "tiny"]
    done = subprocess.run(
        [*command, "--rounds=1", "--steps=1"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in contenders:
        assert re.search(rf"│ {name} +│ +[0-9.]+ │", done.stdout), done.stdout
