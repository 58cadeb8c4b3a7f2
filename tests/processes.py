"""Real processes on this host for tests: start them, wait for them, collect what they return.

    run_processes(fn, 2, n=5)   ->   2 x  fn(n=5), RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set
                                          in processes that `tests.rank_server` forks, or with
                                          fresh=True in   python -m tests.processes folder

Each process has one thread and its warnings are errors. Only processes started here are ended, by
their own handles.
"""

import atexit
import gc
import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.patience import patient

REPOSITORY = Path(__file__).parents[1]
# Lightning warns, on a host that has SLURM or a GPU, of what these ranks do on purpose.
WARNING_FILTERS = (
    "error",
    "ignore:The `srun` command is available",
    "ignore:GPU available but not used",
)
WARNINGS_ARE_ERRORS = tuple(f"-W{one}" for one in WARNING_FILTERS)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a process ended; `output` is its standard output and error together."""

    rank: int
    returncode: int
    output: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """Ranks that a rank server is to start together.

    Attributes:
        folder: Holds the call, and takes what it returns; see `calling_command`.
        environments: All variables of each rank.
        logs: The file of each rank's standard output and error.
        timeout_seconds: After which those that still run are killed.
    """

    folder: str
    environments: Sequence[Mapping[str, str]]
    logs: Sequence[Path]
    timeout_seconds: float


class ProcessesFailedError(AssertionError):
    """A process failed or ran out of time; the message holds every process's output."""


def rank_and_world_size() -> tuple[int, int]:
    """Return RANK and WORLD_SIZE of this process."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def free_port() -> int:
    """Return a port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_processes(
    function: Callable[..., Any],
    num_processes: int,
    *,
    timeout_seconds: float = 100,
    vanishing_ranks: Collection[int] = (),
    fresh: bool = False,
    **arguments: Any,
) -> list[Any]:
    """Run `function(**arguments)` in each of `num_processes` processes; return what they return.

    Args:
        function: A module-level function of an importable module; arguments and results are
            pickled.
        num_processes: The world size that each process is told.
        timeout_seconds: For all of them together.
        vanishing_ranks: These end on purpose without a result (`os._exit(0)`); theirs is None.
        fresh: Start an interpreter for each, which takes seconds to import torch and Lightning.
        **arguments: Passed on.

    Raises:
        ProcessesFailedError: One ended with another status than 0, or the time ran out.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = calling_command(folder, function, arguments)
        if fresh:
            finished = run_commands([command] * num_processes, timeout_seconds=timeout_seconds)
        else:
            finished = _run_forked(folder, num_processes, timeout_seconds)
        check(finished)
        return [
            None if rank in vanishing_ranks else read_result(folder, rank)
            for rank in range(num_processes)
        ]


def calling_command(
    folder: str, function: Callable[..., Any], arguments: dict[str, Any]
) -> list[str]:
    """Write the call into `folder`; return what each rank runs to make it."""
    call = pickle.dumps((function.__module__, function.__qualname__, arguments))
    Path(folder, "call.pickle").write_bytes(call)
    return [sys.executable, *WARNINGS_ARE_ERRORS, "-m", "tests.processes", folder]


def read_result(folder: str, rank: int) -> Any:
    """Return what the function returned on `rank`."""
    return pickle.loads(Path(folder, f"result_{rank}.pickle").read_bytes())


def run_script(
    script: Path, num_processes: int, *arguments: str, timeout_seconds: float = 100
) -> list[Finished]:
    """Run a Python script in each of `num_processes` processes; return how each ended."""
    command = [sys.executable, str(script), *arguments]
    return run_commands([command] * num_processes, timeout_seconds=timeout_seconds)


def run_alone(*arguments: str, timeout_seconds: float = 100) -> Finished:
    """Run Python in a process that no launcher has told a rank; return how it ended."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patient(timeout_seconds),
        check=False,
    )
    return Finished(rank=0, returncode=done.returncode, output=done.stdout)


def run_commands(commands: Sequence[Sequence[str]], *, timeout_seconds: float) -> list[Finished]:
    """Run one command per rank, together; end those that outlive the time, with status -9."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank_{rank}.log" for rank in range(len(commands))]
        processes = [
            _start(command, rank, len(commands), port, log)
            for rank, (command, log) in enumerate(zip(commands, logs, strict=True))
        ]
        deadline = time.monotonic() + patient(timeout_seconds)
        try:
            for process in processes:
                _wait_until(process, deadline)
        finally:
            for process in processes:
                process.kill()  # does nothing to one that has ended
                process.wait()
        return [
            Finished(
                rank=rank, returncode=process.returncode, output=log.read_text(errors="replace")
            )
            for rank, (process, log) in enumerate(zip(processes, logs, strict=True))
        ]


def _run_forked(folder: str, num_processes: int, timeout_seconds: float) -> list[Finished]:
    """Make the call that `folder` holds in ranks that the rank server forks."""
    port, server = free_port(), _rank_server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as logs:
        request = Request(
            folder=folder,
            environments=[_variables(rank, num_processes, port) for rank in range(num_processes)],
            logs=[Path(logs) / f"rank_{rank}.log" for rank in range(num_processes)],
            timeout_seconds=patient(timeout_seconds),
        )
        try:
            pickle.dump(request, server.stdin)
            server.stdin.flush()
            statuses: list[int] = pickle.load(server.stdout)
        except BaseException:  # a time-out of the test: the next one must not read this one's reply
            _rank_server.cache_clear()
            _end(server)
            raise
        return [
            Finished(rank=rank, returncode=status, output=log.read_text(errors="replace"))
            for rank, (status, log) in enumerate(zip(statuses, request.logs, strict=True))
        ]


@cache
def _rank_server() -> "subprocess.Popen[bytes]":
    """Start this process's server; it ends when its pipe does."""
    server = subprocess.Popen(
        [sys.executable, *WARNINGS_ARE_ERRORS, "-m", "tests.rank_server"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(_end, server)
    return server


def _end(server: "subprocess.Popen[bytes]") -> None:
    """End a server, which kills the ranks that it waits for."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.close()
    server.wait()
    server.stdout.close()


def check(finished: Sequence[Finished]) -> None:
    """Raise ProcessesFailedError, with all output, unless every process ended with status 0."""
    if any(one.returncode for one in finished):
        report = "\n".join(
            f"--- rank {one.rank} ended with {one.returncode}\n{one.output}" for one in finished
        )
        raise ProcessesFailedError(report)


def _start(
    command: Sequence[str], rank: int, world_size: int, port: int, log: Path
) -> subprocess.Popen[bytes]:
    environment = _variables(rank, world_size, port)
    with log.open("wb") as stream:
        return subprocess.Popen(
            command, env=environment, cwd=REPOSITORY, stdout=stream, stderr=subprocess.STDOUT
        )


def _variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def _wait_until(process: subprocess.Popen[bytes], deadline: float) -> None:
    try:
        process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def call(folder: str) -> None:
    """Make the call that `folder` holds.

    Under mpirun a rank that raises ends at once, since others may wait for it.
    """
    mpi_rank = os.environ.get("OMPI_COMM_WORLD_RANK")
    module, name, arguments = pickle.loads(Path(folder, "call.pickle").read_bytes())
    try:
        value = getattr(importlib.import_module(module), name)(**arguments)
    except BaseException:
        if mpi_rank is None:
            raise
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # the interpreter's end would run MPI_Finalize, which waits for every rank
    result = Path(folder, f"result_{mpi_rank or os.environ['RANK']}.pickle")
    result.write_bytes(pickle.dumps(value))
    # A group in a reference cycle (a caught exception) would live on into the interpreter's
    # end, where a Gloo worker that still drops a tensor aborts the process (pytorch#190489).
    gc.collect()


if __name__ == "__main__":
    call(*sys.argv[1:])
