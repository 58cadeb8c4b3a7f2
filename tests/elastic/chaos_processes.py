"""The processes of a disturbed job: started by command or by fork, observed, ended by their ids.

Commands   python -m tests.elastic.chaos_job: Lightning's launcher starts the others
Forks      of a process that has imported everything: a newcomer is there in a moment
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.elastic.chaos_job import Job, run_forked
from tests.processes import REPOSITORY, free_port

_MARK = "LIGHTNING_SHARD_TEST_CHAOS"
_CHECK_SECONDS = 0.02
_TOKEN = "token of the chaos"
_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.elastic.chaos_job"])


class Processes:
    """All processes that a job has had."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.port = free_port()
        self._folder = Path(job.folder)
        self._commands: list[subprocess.Popen[bytes]] = []
        self._forks: list[Any] = []
        self.struck: dict[int, str] = {}  # by what each process that was disturbed for good ended

    # --- starting ---------------------------------------------------------------------------------

    def start_by_launcher(self) -> None:
        """Start the main process, which starts the other initial ranks."""
        self._run([sys.executable, "-m", "tests.elastic.chaos_job", self.job.to_json()])

    def start_by_fork(self) -> None:
        """Start the initial ranks as a scheduler would: each is told its place."""
        for rank in range(self.job.num_ranks):
            self._fork(
                LOCAL_RANK=str(rank),
                NODE_RANK="0",
                WORLD_SIZE=str(self.job.num_ranks),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(self.port),
                LIGHTNING_SHARD_JOB_TOKEN=_TOKEN,
            )

    def add(self, *, by_command: bool) -> int:
        """Start a newcomer, as the first rank has said; return its process id."""
        command = self._invitation()
        if by_command and command:
            return self._run(["env", *command])
        told = dict(word.split("=", 1) for word in command if word.startswith("LIGHTNING_"))
        if not told:
            job = f"127.0.0.1:{self.port}"
            told = {"LIGHTNING_SHARD_JOB": job, "LIGHTNING_SHARD_JOB_TOKEN": _TOKEN}
        return self._fork(**told)

    def _invitation(self) -> list[str]:
        said = "".join(one.read_text(errors="replace") for one in self._folder.glob("main-*.log"))
        found = re.search("To add a rank: (.*)", said)
        return shlex.split(found[1]) if found else []

    def _run(self, command: list[str]) -> int:
        log = self._folder / f"main-{len(self._commands)}.log"
        variables = os.environ | {_MARK: self.job.folder, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, env=variables, cwd=REPOSITORY, stdout=stream, stderr=subprocess.STDOUT
            )
        self._commands.append(process)
        return process.pid

    def _fork(self, **variables: str) -> int:
        fork = _FORKS.Process(target=run_forked, args=(self.job, variables | self._marks()))
        fork.start()
        self._forks.append(fork)
        assert fork.pid is not None
        return fork.pid

    def _marks(self) -> dict[str, str]:
        return {_MARK: self.job.folder, "OMP_NUM_THREADS": "1"}

    # --- disturbing -------------------------------------------------------------------------------

    def strike(self, process: int, signum: signal.Signals) -> None:
        """Send a signal by which a process of the job ends."""
        self.struck[process] = signum.name
        self.signal(process, signum)

    def signal(self, process: int, signum: signal.Signals) -> None:
        """Send a signal to a process of the job, which has not ended yet."""
        if not self.runs(process):
            raise ValueError(f"Process {process} has ended before {signum.name} could be sent.")
        os.kill(process, signum)

    def server(self) -> int:
        """The server's process id."""
        (found,) = [one for one in self.living() if b"rendezvous_server" in _read(one, "cmdline")]
        return found

    # --- observing --------------------------------------------------------------------------------

    def runs(self, process: int) -> bool:
        """Whether this process of the job lives."""
        for one in self._commands:
            one.poll()
        for one in self._forks:
            one.join(0)
        return _read(process, "stat").rpartition(b")")[2].split()[:1] not in ([], [b"Z"])

    def living(self) -> list[int]:
        """All processes of the job that live, ranks and others."""
        mark = f"{_MARK}={self.job.folder}".encode()
        numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        marked = [one for one in numbers if mark in _read(one, "environ").split(b"\0")]
        forked = [one.pid for one in self._forks]
        return [one for one in {*marked, *forked} if self.runs(one)]

    def statuses(self) -> dict[int, int]:
        """How those that were started here have ended, by process id."""
        ended = {one.pid: one.poll() for one in self._commands}
        ended |= {one.pid: one.exitcode for one in self._forks}
        return {process: status for process, status in ended.items() if status is not None}

    def wait_until_all_have_ended(self, seconds: float) -> None:
        """Wait for ranks, rendezvous server and whatever else the job has started."""
        await_that(lambda: not self.living(), "all processes of the job have ended", seconds)

    def report(self) -> str:
        """What all processes have said."""
        logs = sorted(self._folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
        return "\n".join(f"--- {one.name}\n{one.read_text(errors='replace')}" for one in logs)

    def end(self) -> None:
        """End what is left, having each rank say where it is."""
        ranks = [int(path.stem) for path in self._folder.glob("*.journal")]
        left = self.living()
        for process in left:
            if process in ranks:
                os.kill(process, signal.SIGUSR1)
                os.kill(process, signal.SIGCONT)
        time.sleep(0.5 if left else 0.0)
        for process in left:
            if self.runs(process):
                os.kill(process, signal.SIGKILL)
        for one in self._commands:
            one.wait()
        for one in self._forks:
            one.join()


def await_that(is_so: Callable[[], bool], what: str, seconds: float) -> None:
    """Wait until it is so."""
    for _ in ticks(seconds):
        if is_so():
            return
    raise TimeoutError(f"Waited for {seconds:.0f} s until {what}.")


def ticks(seconds: float) -> Iterator[None]:
    """Yield now and then until the time has run out."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(_CHECK_SECONDS)


def _read(process: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{process}/{name}").read_bytes()
    except OSError:  # it has ended
        return b""
