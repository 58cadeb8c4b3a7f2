"""The harness itself: variables, failures, time-outs, and that no rank is left behind."""

import os
import sys
import time
from pathlib import Path

import pytest

from tests.mpirun import OF_LAUNCHERS, living, run_mpi, run_mpi_command
from tests.processes import ProcessesFailedError

pytestmark = pytest.mark.mpi


def describe(*, word: str) -> tuple[str, ...]:
    from mpi4py import MPI

    assert not any(name in os.environ for name in OF_LAUNCHERS)
    rank_of_mpi = str(MPI.COMM_WORLD.Get_rank())
    return word, rank_of_mpi, *(os.environ[f"OMPI_COMM_WORLD_{name}"] for name in ("RANK", "SIZE"))


def fail_on_rank_one() -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_rank() == 1:
        raise ValueError("rank one had enough")
    MPI.COMM_WORLD.Barrier()


def sleep_long(*, folder: Path) -> None:
    print("asleep", flush=True)
    (folder / os.environ["OMPI_COMM_WORLD_RANK"]).write_text(str(os.getsid(0)))
    time.sleep(600)


def vanish_on_rank_one() -> str:
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        os._exit(0)
    return os.environ["WORD"]


@pytest.mark.slow
def test_each_rank_has_the_variables_of_mpirun_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    assert run_mpi(describe, 2, word="hi") == [("hi", "0", "0", "2"), ("hi", "1", "1", "2")]


def test_a_failure_shows_the_output_and_ends_the_others() -> None:
    with pytest.raises(ProcessesFailedError, match="ValueError: rank one had enough"):
        run_mpi(fail_on_rank_one, 2)


@pytest.mark.slow
def test_ranks_that_take_too_long_are_ended(tmp_path: Path) -> None:
    with pytest.raises(ProcessesFailedError, match=r"ended with -9\nasleep"):
        run_mpi(sleep_long, 2, timeout_seconds=8, folder=tmp_path)
    sessions = {int(file.read_text()) for file in tmp_path.iterdir()}
    assert len(sessions) == 1
    assert living(sessions.pop()) == []


def test_a_rank_may_vanish() -> None:
    result = run_mpi(vanish_on_rank_one, 2, vanishing_ranks=[1], variables={"WORD": "here"})
    assert result == ["here", None]


def test_a_command_with_an_option_of_mpirun() -> None:
    code = "import os, sys; print(os.environ['OMPI_COMM_WORLD_RANK'], os.environ['WORD'])"
    finished = run_mpi_command([sys.executable, "-c", code], 2, options=["-x", "WORD=hi"])
    assert [(one.returncode, one.output) for one in finished] == [(0, "0 hi\n"), (0, "1 hi\n")]


def test_the_status_of_a_command() -> None:
    finished = run_mpi_command([sys.executable, "-c", "raise SystemExit(3)"], 2)
    assert [one.returncode for one in finished] == [3, 3]
