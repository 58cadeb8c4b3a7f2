"""Races that are planted in fits without elements are found, each by its own names."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_like.planted_races import RACES

pytestmark = pytest.mark.slow

# Parts of what is found: who does what first, and then, of at least one of the races of a fit.
FOUND = {
    "gathered parameters are used at once": ("_allgather_base_", "stream reads"),
    "published parameters are used at once": ("_allgather_base_", "stream reads"),
    "reduced shards are used at once": ("_reduce_scatter_base_", "stream"),
    "averages are used at once": ("allreduce_", "stream"),
    "received activations are used at once": ("recv_", "stream reads"),
    "sums of layers are used at once": ("allreduce_", "stream"),
    "other ranks' heads are used at once": ("alltoall_base_", "stream reads"),
    "shards of all dimensions are used at once": ("_reduce_scatter_base_", "stream"),
    "averaged parameters are used at once": ("allreduce_", "stream"),
    "chosen elements are used at once": ("alltoall_base_", "stream reads"),
    "matrices of low rank are used at once": ("allreduce_", "stream"),
    "signs are used at once": ("_allgather_base_", "stream reads"),
    "bytes are used at once": ("alltoall_base_", "stream reads"),
    "a sum is divided before it has come": ("_reduce_scatter_base_", "div_"),
    "memory that is gathered into is freed": ("_allgather_base_", "reuse, freed by resize_(0)"),
    "gradients on their way are freed": ("_reduce_scatter_base_", "reuse, freed by resize_(0)"),
    "gradients on their way are changed": ("_reduce_scatter_base_", "zero_"),
    "a shard that is gathered is changed": ("_allgather_base_", "mul_"),
    "flags on their way are changed": ("allreduce_", "zero_"),
    "a message is changed before it is sent up": ("stream reads: _to_copy", "host writes: zero_"),
    "copies follow nothing": ("stream", "side stream"),
    "what is copied down is not kept": ("side stream", "reuse"),
    "what is copied up is used at once": ("side stream", "stream reads"),
    "the host reads what is still copied down": ("side stream 1 writes: copy_", "host reads"),
    "the host changes what is copied up": ("side stream", "host writes"),
    "another stream reads at once": ("_allgather_base_", "side stream"),
    "another stream is read from at once": ("side stream", "stream reads: sum"),
    "memory that another stream reads is dropped": ("side stream", "stream writes: reuse"),
}


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """Run all fits in a process of its own, which torch tells of the device for good."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu_like.planted_races"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return dict(json.loads(line) for line in run.stdout.splitlines() if line.startswith("["))


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", RACES)
def test_a_planted_race_is_found(seen: dict[str, Any], name: str) -> None:
    first, second = FOUND[name]
    assert not seen[name]["error"]  # else nothing was looked at
    races = seen[name]["races"]
    assert any(first in one and second in other for one, other, _ in races), races
