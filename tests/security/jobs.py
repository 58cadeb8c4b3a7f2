"""Jobs to attack: started, found by their environment, ended by the test that has started them."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mpirun import MPIRUN
from tests.patience import patient
from tests.processes import REPOSITORY, free_port, run_processes
from tests.security.program import fit_and_tell
from tests.security.sockets import Listener, listeners_of, processes_with

SECRET = "the secret of the job that is attacked"
_PATIENCE_SECONDS = 250.0
_OF_JOBS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LIGHTNING_SHARD_JOB")


@dataclass(frozen=True, kw_only=True)
class RunningJob:
    """A job of two ranks that waits to be attacked.

    Attributes:
        mark: NAME=value that each of its processes has in its environment.
    """

    folder: Path
    process: "subprocess.Popen[bytes]"
    mark: str
    master_port: int

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def listeners(self) -> list[Listener]:
        return listeners_of(processes_with(self.mark))

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def end(self) -> None:
        """Wait for its end, which must be a good one."""
        assert self.process.wait(_PATIENCE_SECONDS) == 0, self.output()

    def wait_for(self, is_so: Callable[[], bool], seconds: float = _PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + patient(seconds)
        while not is_so():
            assert self.is_running or is_so(), self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)


class ForkedJob:
    """A job whose ranks the tests' rank server forks, as fast as can be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pool = ThreadPoolExecutor(1)
        self._run = self._pool.submit(
            run_processes,
            fit_and_tell,
            2,
            folder=folder,
            strategy="zero3_gloo",
            timeout_seconds=_PATIENCE_SECONDS,
        )

    @property
    def is_running(self) -> bool:
        return not self._run.done()

    def listeners(self) -> list[Listener]:
        ranks = [int(path.read_text()) for path in self.folder.glob("waits-*")]
        return listeners_of(ranks)

    def output(self) -> str:
        return str(self._run.exception()) if self._run.done() else ""

    def end(self) -> None:
        """Wait for its end, which must be a good one."""
        self._run.result()

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + patient(_PATIENCE_SECONDS)
        while not is_so():
            assert self.is_running or is_so(), self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)


@contextmanager
def forked_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkedJob]:
    """Start a job of two forked ranks; when it waits in its middle, yield it."""
    monkeypatch.setenv("LIGHTNING_SHARD_JOB_TOKEN", SECRET)
    job = ForkedJob(folder)
    try:
        job.wait_for(lambda: len(list(folder.glob("waits-*"))) == 2)
        yield job
    finally:
        (folder / "attacked").touch()  # they go on, and end


Job = RunningJob | ForkedJob

# MPI listens on all addresses, and asks nobody who it is, where its BTL "tcp" is not left out.
_ON_ONE_HOST = ("--allow-run-as-root", "--oversubscribe", "--mca", "btl", "self,sm")
LAUNCHERS = {
    "our launcher": ("zero3_gloo", []),
    "torchrun": ("zero3_gloo", ["torchrun", "--nproc-per-node=2", "--master-port={port}"]),
    "mpirun": ("zero3_mpi", [MPIRUN, *_ON_ONE_HOST, "-n", "2"]),
    "elastic": ("elastic", []),
}


@contextmanager
def running_job(launcher: str, folder: Path) -> Iterator[RunningJob]:
    """Start a job; when it waits in its middle, yield it; end what is left of it."""
    strategy, start = LAUNCHERS[launcher]
    port, mark = free_port(), f"LIGHTNING_SHARD_TEST_JOB={uuid.uuid4().hex}"
    command = [one.format(port=port) for one in start]
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", *command[1:]]
    python = [] if launcher == "torchrun" else [sys.executable]
    command += [*python, "-m", "tests.security.program", str(folder), strategy]
    environment = {name: value for name, value in os.environ.items() if name not in _OF_JOBS}
    name, value = mark.split("=")
    environment |= {name: value, "LIGHTNING_SHARD_JOB_TOKEN": SECRET, "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    job = RunningJob(folder=folder, process=process, mark=mark, master_port=port)
    try:
        job.wait_for(lambda: len(list(folder.glob("waits-*"))) == 2)
        yield job
    finally:
        for one in processes_with(mark):
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        process.kill()
        process.wait()
