"""Ranks under a real mpirun, for tests: start them, wait for them, collect what they return.

    run_mpi(fn, 2, n=5)   ->   mpirun -n 2 python -m tests.processes folder
                                   fn(n=5), with the variables that mpirun sets and no others

It is `tests.processes` with mpirun as the launcher: one thread per rank, warnings are errors, and
only processes started here are ended.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.patience import patient
from tests.processes import REPOSITORY, Finished, calling_command, check, read_result

MPIRUN = str(Path(sys.executable).parent / "mpirun")
OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
# mpirun forwards a rank's output through itself and loses the end of it when it is killed; a file
# of the rank's own does not.
_LOGGED = 'exec "$@" >"$RANK_LOGS/rank_$OMPI_COMM_WORLD_RANK.log" 2>&1'
_OWN_LOG = "mpirun.log"
# Open MPI's own server sometimes gives up on a busy host, before any rank is started.
_NOT_STARTED = "The PMIx server's listener thread failed to start"
_STARTS = 3
_GRACE_SECONDS = 5.0


def run_mpi(
    function: Callable[..., Any],
    num_ranks: int,
    *,
    timeout_seconds: float = 100,
    vanishing_ranks: Collection[int] = (),
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    **arguments: Any,
) -> list[Any]:
    """Run `function(**arguments)` in each of `num_ranks` ranks; return what they return.

    Args:
        function: A module-level function of an importable module; arguments and results are
            pickled. A rank in which it raises ends at once, and mpirun then ends the others.
        num_ranks: The size of MPI's COMM_WORLD.
        timeout_seconds: For all of them together.
        vanishing_ranks: These end without a result; theirs is None, and mpirun's status is then
            not looked at. (mpirun ends the survivors too, unless an option tells it not to.)
        options: More options of mpirun.
        variables: More environment variables of every rank.
        **arguments: Passed on.

    Raises:
        ProcessesFailedError: mpirun ended with another status than 0, or the time ran out.
    """
    with tempfile.TemporaryDirectory() as folder:
        finished = run_mpi_command(
            calling_command(folder, function, arguments),
            num_ranks,
            timeout_seconds=timeout_seconds,
            options=options,
            variables=variables,
        )
        if not vanishing_ranks or not all(
            Path(folder, f"result_{rank}.pickle").exists()
            for rank in set(range(num_ranks)) - set(vanishing_ranks)
        ):
            check(finished)
        return [
            None if rank in vanishing_ranks else read_result(folder, rank)
            for rank in range(num_ranks)
        ]


def run_mpi_command(
    command: Sequence[str],
    num_ranks: int,
    *,
    timeout_seconds: float = 100,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> list[Finished]:
    """Run `mpirun -n num_ranks command`; return each rank's output, with mpirun's own status.

    When the time runs out the status is -9 and no process is left. What mpirun itself says stands
    at the end of rank 0's output.
    """
    for _ in range(_STARTS):
        with tempfile.TemporaryDirectory() as folder:
            with mpirun(command, num_ranks, Path(folder), options, variables) as process:
                try:
                    status = process.wait(timeout=patient(timeout_seconds))
                except subprocess.TimeoutExpired:
                    status = -signal.SIGKILL
            own = _read(Path(folder) / _OWN_LOG)
            logs = [read_log(Path(folder), rank) for rank in range(num_ranks)]
        if _NOT_STARTED not in own:
            break
    logs[0] += own
    return [Finished(rank=r, returncode=status, output=log) for r, log in enumerate(logs)]


@contextmanager
def mpirun(
    command: Sequence[str],
    num_ranks: int,
    folder: Path,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start `mpirun -n num_ranks command`, and leave no process of it behind."""
    with (folder / _OWN_LOG).open("wb") as stream:
        process = subprocess.Popen(
            [*_mpirun(num_ranks), *options, "sh", "-c", _LOGGED, "sh", *command],
            env=_environment(str(folder), variables or {}),
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its ranks can be told from other processes
        )
    try:
        yield process
    finally:
        _end(process)


def read_log(folder: Path, rank: int) -> str:
    """Return what a rank has written to its standard output and error so far."""
    return _read(folder / f"rank_{rank}.log")


def _mpirun(num_ranks: int) -> list[str]:
    return [MPIRUN, "--map-by", ":OVERSUBSCRIBE", "-n", str(num_ranks)]


def _environment(folder: str, variables: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHERS}
    kept |= {"OMP_NUM_THREADS": "1", "RANK_LOGS": folder}
    if os.geteuid() == 0:
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
            kept |= {name: "1", f"{name}_CONFIRM": "1"}
    return kept | dict(variables)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End mpirun, which ends its ranks, and then whatever is left of its session."""
    process.terminate()  # does nothing to one that has ended
    try:
        process.wait(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    while left := living(process.pid):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def living(session: int) -> list[int]:
    """Return the processes of a session, without those that only wait to be buried."""
    command = ["ps", "-o", "pid=,stat=", "-s", str(session)]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    rows = [row.split() for row in listed.splitlines()]
    return [int(pid) for pid, state in rows if not state.startswith("Z")]


def _read(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""
