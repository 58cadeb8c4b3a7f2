"""A training that is killed while it saves loses nothing, and goes on with the same bits."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.interrupted import EPOCH_BATCHES
from tests.checkpoint.kills.killing import after_a_kill, kill_many
from tests.checkpoint.kills.trainings import FORMATS, Case
from tests.processes import run_processes

SHM = Path("/dev/shm")


def kill(case: Case, where: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill from a process that has one thread."""
    told: dict[str, Any] = {"case": case, "root": str(where), "kills": kills, "seed": seed}
    (counts,) = run_processes(kill_many, 1, **told, timeout_seconds=1500)
    assert counts["kills"] == kills
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_a_killed_training_goes_on_where_it_was_saved(kind: str, tmp_path: Path) -> None:
    assert kill(Case("zero3", kind, num_steps=6), tmp_path, 2, seed=0)["checkpoints read"] > 0


@pytest.mark.parametrize("backend", ["in_process", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_fit_that_was_killed_in_mid_epoch_has_the_bits_of_one_that_was_not(backend: str) -> None:
    case, step = Case("zero3", "sharded", backend=backend, num_steps=9), EPOCH_BATCHES + 2
    told: dict[str, Any] = {"case": case, "rank": 1, "step": step}
    ((whole, resumed),) = run_processes(after_a_kill, 1, **told)
    assert sorted(resumed) == list(range(step + 1, case.num_steps + 1))
    assert resumed == {number: whole[number] for number in resumed}


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("where", ["disk", "memory"])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("scheme", ["zero3", "shard_ddp"])
def test_a_hundred_killed_trainings_lose_nothing(
    scheme: str, kind: str, where: str, tmp_path: Path
) -> None:
    if where == "memory" and not os.access(SHM, os.W_OK):
        pytest.skip(f"{SHM} is not there to write to")
    counts = kill(Case(scheme, kind), SHM if where == "memory" else tmp_path, 100, seed=1)
    assert counts["while saving"] > 0
    assert counts["leaving something"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("kind", FORMATS)
def test_ranks_of_their_own_are_killed_one_after_the_other(kind: str, tmp_path: Path) -> None:
    counts = kill(Case("zero3", kind, backend="gloo"), tmp_path, 40, seed=2)
    assert counts["leaving something"] > 0
