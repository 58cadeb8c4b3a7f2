"""A job that `elastic.py` measures: its processes, and what their diaries say."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE_SECONDS = 180.0
JOB = "tests.benchmarks.elastic_job"
SNAPSHOTS = Path("/dev/shm")
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What all jobs of a benchmark have in common."""

    num_ranks: int = 4
    width: int = 128
    batch_size: int = 8
    snapshot_every: int = 10


@dataclass(frozen=True, kw_only=True)
class Step:
    """The end of an optimizer step of one rank."""

    time: float
    pid: int
    step: int
    rank: int
    size: int
    generation: int
    marks: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one rank says of a turn, per step; see `elastic.Cost`."""

    time: float
    pid: int
    rank: int
    seconds: float
    cpu_seconds: float
    held_bytes: int
    snapshot_bytes: int


@dataclass(kw_only=True)
class _Diary:
    """How far a process's file was read."""

    path: Path
    offset: int = 0

    def new_lines(self) -> list[dict[str, Any]]:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            full = file.read().rpartition(b"\n")[0]
        self.offset += len(full) + bool(full)
        return [json.loads(line) for line in full.splitlines()]


@dataclass
class Job:
    """Processes that train until the end of the context.

    Args:
        num_restarts: Under torchrun, which may start it anew so often; 0 does without torchrun.
    """

    options: Options
    folder: Path
    scheme: str = "elastic"
    takes_turns: bool = False
    num_restarts: int = 0
    steps: list[Step] = field(default_factory=list)
    _turns: list[Turn] = field(default_factory=list)
    _waiting: list[int] = field(default_factory=list)  # processes, each as often as it did
    _diaries: dict[Path, _Diary] = field(default_factory=dict)
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> "Job":
        self.folder.mkdir(exist_ok=True)
        launcher = [sys.executable, "-m"]
        if self.num_restarts:
            launcher += ["torch.distributed.run", "--rdzv-backend=c10d"]
            launcher += ["--rdzv-endpoint=127.0.0.1:0", f"--rdzv-id=benchmark{os.getpid()}"]
            launcher += [f"--nproc-per-node={self.options.num_ranks}"]
            launcher += [f"--max-restarts={self.num_restarts}", "-m"]
        self._start([*launcher, *self._program()], {})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.read()
        first = self._processes[0]
        started = {one.pid for one in self._processes}
        if self.num_restarts:  # torchrun's workers have sessions of their own
            started |= {one.pid for one in self.steps if one.generation == self.newest_generation}
            first.kill()  # before it starts more
        for pid in started:
            with suppress(ProcessLookupError):  # all of them have ended
                os.killpg(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        for left in SNAPSHOTS.glob(f"lightning_shard-*-{first.pid}"):
            shutil.rmtree(left)

    def _program(self) -> list[str]:
        program = [JOB, str(self.folder), f"--ranks={self.options.num_ranks}"]
        program += [f"--scheme={self.scheme}", f"--snapshot-every={self.options.snapshot_every}"]
        program += [f"--width={self.options.width}", f"--batch-size={self.options.batch_size}"]
        return program + ["--takes-turns"] * self.takes_turns

    def _start(self, command: list[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
        with Path(self.folder, "output.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # to be ended with its children
            )
        self._processes.append(process)
        return process

    # --- ranks ------------------------------------------------------------------------------------

    def start_newcomer(self) -> subprocess.Popen[bytes]:
        """Start a process that will join, and wait until it has all but done so."""
        said = re.search(r"To add a rank: (.*)", self._output())
        assert said is not None
        words = shlex.split(said[1])
        variables = dict(word.split("=", 1) for word in words if word.startswith("LIGHTNING_SHARD"))
        program = [sys.executable, "-m", *self._program(), "--waits"]
        newcomer = self._start(program, variables)
        self._wait(lambda: newcomer.pid in self._waiting, "a newcomer does not come")
        return newcomer

    def let_in(self, newcomer: subprocess.Popen[bytes]) -> None:
        """Let a newcomer join."""
        _tell(newcomer, "")

    def kill(self, pid: int) -> None:
        """End a rank of this job at once."""
        os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            if process.pid == pid:
                process.wait()

    def take_turn(self, snapshot_every: int) -> list[Turn]:
        """Let the job take one turn; return what each rank says of it."""
        first = self._processes[0]
        num_waits = len(self._waiting)
        self._wait(lambda: len(self._waiting) > 0, "the job does not begin")
        num_waits, self._turns = len(self._waiting), []
        _tell(first, str(snapshot_every))
        self._wait(
            lambda: len(self._turns) == self.options.num_ranks and len(self._waiting) > num_waits,
            "a turn does not end",
        )
        return self._turns

    # --- diaries ----------------------------------------------------------------------------------

    @property
    def newest_generation(self) -> int:
        """The greatest number of a generation that has finished a step."""
        return max((one.generation for one in self.steps), default=0)

    def read(self) -> None:
        """Read what ranks have written since."""
        for path in self.folder.glob("*.jsonl"):
            for line in self._diaries.setdefault(path, _Diary(path=path)).new_lines():
                what = line.pop("what")
                if what == "step":
                    self.steps.append(Step(**line))
                elif what == "turn":
                    self._turns.append(Turn(**line))
                else:
                    self._waiting.append(line["pid"])

    def wait_for_ranks(self, size: int) -> None:
        """Wait until a generation of this size has finished a step."""

        def is_there() -> bool:
            newest = self.newest_generation
            return any(one.size == size and one.generation == newest for one in self.steps)

        self._wait(is_there, f"there are never {size} ranks")

    def wait_for_steps(self, number: int) -> None:
        """Wait until the newest generation has finished so many more steps."""
        generation = self.newest_generation
        goal = number + max((one.step for one in self.steps), default=0)
        self._wait(
            lambda: any(one.generation == generation and one.step >= goal for one in self.steps),
            "training stands still",
        )

    def wait_for_generation_after(self, generation: int) -> list[Step]:
        """Wait until all ranks of a newer one have finished a step; return these steps."""

        def first_steps() -> list[Step]:
            newer = [one for one in self.steps if one.generation > generation]
            newest = max((one.generation for one in newer), default=0)
            first = {one.pid: one for one in reversed(newer) if one.generation == newest}
            return list(first.values())

        self._wait(
            lambda: len(found := first_steps()) > 0 and len(found) == found[0].size,
            "the job does not recover",
        )
        return first_steps()

    def _output(self) -> str:
        return Path(self.folder, "output.log").read_text(errors="replace")

    def _wait(self, is_so: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_so():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{otherwise}; the ranks have printed:\n{self._output()}")
            time.sleep(0.05)
            self.read()


def _tell(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n".encode())
    process.stdin.flush()
