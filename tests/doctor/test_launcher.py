"""Launchers' variables that do not go together are told."""

import pytest

from lightning_shard.doctor.launcher import launcher
from tests.environments.variables import set_only

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "1",
}


def told(monkeypatch: pytest.MonkeyPatch, **variables: str) -> list[str]:
    set_only(monkeypatch, variables)
    return [f"{one.subject}, {one.state}: {one.found}" for one in launcher()]


def test_without_variables_a_trainer_starts_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch) == ["launcher, ok: none: a Trainer starts the ranks of this host"]


def test_a_rank_of_torchrun_knows_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, **TORCHRUN) == [
        "torchrun, ok: rank 1 of 4, local rank 1 on host 0 of 2"
    ]


def test_a_rank_outside_the_world_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = told(monkeypatch, **{**TORCHRUN, "RANK": "4"})
    assert found.startswith("torchrun, failure: RANK is 4 and WORLD_SIZE is 4; expected 0 <=")


def test_one_launcher_inside_another_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(monkeypatch, **TORCHRUN, **SLURM)
    assert found[-1] == "launchers, failure: torchrun says rank 1 and srun says rank 0"


def test_half_of_the_variables_set_by_hand_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = told(monkeypatch, WORLD_SIZE="4", RANK="0")
    assert found == "launcher, warning: none that is known, but RANK, WORLD_SIZE set by hand"


def test_a_job_with_a_wrong_address_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(monkeypatch, LIGHTNING_SHARD_JOB="here")
    assert found[-1].startswith("elastic job, failure: ")
    assert "expected host:port" in found[-1]


def test_what_makes_runs_slow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(monkeypatch, LIGHTNING_SHARD_DEBUG="1", TORCH_DISTRIBUTED_DEBUG="OFF")
    assert found[1:] == [
        "LIGHTNING_SHARD_DEBUG, warning: is 1: ranks compare every call before they make it"
    ]
