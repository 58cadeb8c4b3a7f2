"""What a host lacks is said with what to do."""

import importlib.util
import os
import resource
import shutil
import sys
from collections import namedtuple
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from lightning_shard.backends.registry import backend_names, get_backend
from lightning_shard.backends.shm.heap import SYSTEM_CALLS
from lightning_shard.tools.doctor import host
from lightning_shard.tools.doctor.host import Finding, launcher, size
from tests.environments.variables import set_only

Usage = namedtuple("Usage", "total used free")


def finding(subject: str) -> Finding:
    return next(one for one in host.host() if one.subject == subject)


def test_a_small_shared_memory_is_told_with_the_option_of_docker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**26, 0, 2**26))
    found = finding("shared memory")
    assert (found.state, found.found) == ("warning", "/dev/shm: 64 MiB free of 64 MiB")
    assert "--shm-size" in found.advice


def test_a_clock_that_nobody_sets_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_kernel_clock_state", lambda: 5)
    assert finding("clock").state == "warning"
    monkeypatch.setattr(host, "_kernel_clock_state", lambda: 0)
    assert finding("clock").state == "ok"
    monkeypatch.setattr(host, "_kernel_clock_state", lambda: None)
    assert finding("clock").state == "absent"


def test_few_open_files_are_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 524288))
    assert "ulimit -n 65536" in finding("open files").advice


def test_a_directory_that_cannot_be_written_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("no space left")))
    assert finding("this directory").state == "failure"
    assert not list(tmp_path.iterdir())


def test_a_file_server_with_another_time_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host, "_replaced_file", lambda _: -90.0)
    assert "differs from this host's by -90.0 s" in finding("its clock").found


def test_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = host.memory_bytes()
    (tmp_path / "memory.max").write_text("1048576\n")
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    assert host.memory_bytes() == 2**20 < whole
    (tmp_path / "memory.max").write_text("max\n")
    assert host.memory_bytes() >= whole
    assert size(host.memory_bytes()) in finding("memory").found


def test_sizes_are_in_the_largest_unit() -> None:
    assert [size(one) for one in (0, 1023, 1536, 2**40)] == ["0 B", "1023 B", "1.5 KiB", "1 TiB"]


@pytest.mark.parametrize("name", [name for name in backend_names() if name != "mpi"])
def test_a_backend_is_here_if_it_says_so_itself(name: str) -> None:
    assert (host.lacking(name) is None) == (get_backend(name).unavailable_reason() is None)


def test_mpi_is_absent_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert "pip install 'lightning-shard[mpi]'" in str(host.lacking("mpi"))


def test_the_machines_of_shm_are_those_that_it_has_been_proved_on() -> None:
    assert set(host._SHM_MACHINES) == set(SYSTEM_CALLS)


def test_without_torch_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert {host.lacking(name) for name in backend_names()} == {"torch is not installed"}


def versions(monkeypatch: pytest.MonkeyPatch, lines: list[str], **installed: str) -> list[str]:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(host, "requires", lambda _: lines)
    monkeypatch.setattr(host, "version", version)
    return [f"{one.state}: {one.found} {one.advice}" for one in host.software()][1:]


def test_what_is_missing_or_too_old_has_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["torch>=2.11", "rich>=13", "nothing>=2", 'ray>=2; extra == "ray"']
    assert versions(monkeypatch, lines, torch="2.9.1", rich="15.0") == [
        "failure: 2.9.1, expected >=2.11 pip install 'torch>=2.11'",
        "ok: 15.0 ",
        "failure: not installed pip install 'nothing>=2'",
    ]


def test_a_version_that_is_left_out_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = versions(monkeypatch, ["lightning>=2.6,!=2.6.2"], lightning="2.6.2")
    assert found.startswith("failure: 2.6.2, expected !=2.6.2,>=2.6")


def test_a_local_build_is_the_version_that_it_is_built_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert versions(monkeypatch, ["torch>=2.11"], torch="2.13.0+cpu") == ["ok: 2.13.0+cpu "]


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
