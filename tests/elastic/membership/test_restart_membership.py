"""Under torchrun a lost worker ends all; those started again go on from snapshots in memory."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.elastic.chaos import Seen
from tests.elastic.chaos_job import NUM_SAMPLES, Job, undisturbed
from tests.patience import patient
from tests.processes import REPOSITORY, run_alone
from tests.strategies.parity import ignoring

pytestmark = ignoring()

_SECONDS = 240


@pytest.mark.slow
@pytest.mark.timeout(2 * _SECONDS)
def test_torchruns_workers_go_on_from_what_lies_in_shared_memory(tmp_path: Path) -> None:
    job = Job(folder=str(tmp_path), num_ranks=2, max_epochs=1, timeout=60.0)
    gate = tmp_path / "gate"
    gate.write_text("8")
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2", "-m"]
    log = (tmp_path / "torchrun.log").open("w")
    agent = subprocess.Popen(
        [sys.executable, *command, "tests.elastic.chaos_job", job.to_json()],
        cwd=REPOSITORY,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    seen = Seen()

    def workers_at(step: int, generation: int) -> list[int]:
        seen.read(job.folder)
        last = {process: steps[-1] for process, steps in seen.steps.items()}
        here = {"step": step, "generation": generation}
        return [process for process, one in last.items() if here.items() <= one.items()]

    try:
        _await(lambda: len(workers_at(8, 1)) == 2, agent)
        os.kill(workers_at(8, 1)[0], signal.SIGKILL)
        _await(lambda: len(workers_at(8, 2)) == 2, agent)
        gate.write_text("100000")
        assert agent.wait(_SECONDS) == 0, (tmp_path / "torchrun.log").read_text()
    finally:
        agent.kill()
        log.close()
    seen.read(job.folder)
    journal, (expected, _) = seen.journal(), undisturbed(job)
    assert journal.samples() == {0: list(range(NUM_SAMPLES))}
    assert journal.losses() == pytest.approx(expected.losses(), rel=1e-4)
    again = {one.step for one in journal.attempts if one.generation == 2}
    assert min(again) == 6  # the last multiple of `snapshot_every` up to 8
    assert not list(Path("/dev/shm").glob(f"lightning_shard-*-{agent.pid}"))


def _await(is_so: Callable[[], bool], agent: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + patient(_SECONDS)
    while not is_so():
        assert agent.poll() is None, "torchrun has ended"
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(_SECONDS)
@pytest.mark.parametrize(
    ("launcher", "what", "steps", "dies"),
    [
        ("trainer", "trainer", "26 39", False),
        ("torchrun", "trainer", "26 39", False),
        ("torchrun", "fit", "26 78", True),
        ("torchrun", "validate", "26 26", True),
    ],
)
def test_a_script_of_several_fits_goes_on_where_it_was(
    launcher: str, what: str, steps: str, dies: bool, tmp_path: Path
) -> None:
    """A script of several fits failed or began anew."""
    program = ["-m", "tests.elastic.several_fits", str(tmp_path), what]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    arguments = [*(torchrun if launcher == "torchrun" else []), *program]
    done = run_alone(*arguments, timeout_seconds=_SECONDS)
    assert done.returncode == 0, done.output
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == [steps] * 2
    assert (tmp_path / "killed").exists() == dies
