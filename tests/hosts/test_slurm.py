"""A real SLURM stops jobs, has them start again, loses a node and runs arrays of them."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts.launching import TOKEN
from tests.hosts.namespaces import named_hosts
from tests.hosts.slurm import SlurmCluster, batch_script
from tests.hosts.slurm_job import NUM_STEPS, fit

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*num_workers.* argument"),
]
_PATIENCE_SECONDS = 180.0
_TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--output=/dev/null")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    folder = tmp_path / "slurm"
    folder.mkdir()
    with named_hosts(tmp_path) as hosts:
        made = SlurmCluster(hosts, folder)
        made.start()
        made.variables["LIGHTNING_SHARD_JOB_TOKEN"] = TOKEN
        yield made


class Job:
    """A job of two tasks, one on each node.

    Args:
        words: The arguments of the program after the folder.
    """

    def __init__(
        self,
        cluster: SlurmCluster,
        folder: Path,
        *words: str,
        scheme: str = "zero3",
        srun: tuple[str, ...] = (),
        sbatch: tuple[str, ...] = (),
    ) -> None:
        self._cluster, self._folder = cluster, folder
        folder.mkdir(exist_ok=True)
        self._log = folder / "log"
        program = [sys.executable, "-m", "tests.hosts.slurm_job", scheme, str(folder), *words]
        command = [f"--output={self._log}", "--open-mode=append", *srun, *program]
        script = batch_script(folder / "job.sh", (*_TWO_NODES, *sbatch), command)
        self.number = cluster.say("sbatch", "--parsable", str(script)).strip()

    def steps(self) -> list[tuple[int, int, float]]:
        """Return the life, the number and the loss of each step."""
        return [(int(a), int(b), float(c)) for a, b, c, _ in steps_in(self._folder)]

    def said(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def wait_for(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not holds():
            assert time.monotonic() < deadline, (self._state(), self.steps(), self.said()[-6000:])
            time.sleep(0.2)

    def wait_for_steps(self, num: int) -> None:
        self.wait_for(lambda: len(self.steps()) >= num)

    def wait_until(self, state: str) -> None:
        self.wait_for(lambda: self._state() == state)

    def _state(self) -> str:
        return self._cluster.job_state(self.number)


def steps_in(folder: Path) -> list[list[str]]:
    file = folder / "steps"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    fit("zero3_in_process", folder, 0.0, None, (2, 1))
    return [float(loss) for _, _, loss, _ in steps_in(folder)]


def check_each_once(job: Job, losses: list[float]) -> None:
    """Check that each step was done once, in its place, over all lives of a job."""
    assert [step for _, step, _ in job.steps()] == list(range(1, NUM_STEPS + 1))
    assert [loss for _, _, loss in job.steps()] == pytest.approx(losses, rel=1e-5)


def test_a_job_that_is_requeued_goes_on_at_the_next_sample(
    cluster: SlurmCluster, tmp_path: Path, undisturbed: list[float]
) -> None:
    job = Job(cluster, tmp_path / "job", "0.2", sbatch=("--requeue",))
    job.wait_for_steps(5)
    cluster.say("scancel", "--signal=USR1", job.number)
    job.wait_until("COMPLETED")
    check_each_once(job, undisturbed)
    assert {life for life, _, _ in job.steps()} == {0, 1}


def test_a_job_that_scancel_terminates_goes_on_at_the_next_sample(
    cluster: SlurmCluster, tmp_path: Path, undisturbed: list[float]
) -> None:
    job = Job(cluster, tmp_path / "job", "0.2")
    job.wait_for_steps(5)
    cluster.say("scancel", "--signal=TERM", job.number)
    job.wait_until("FAILED")
    assert "its state is saved in" in job.said()
    assert len(job.steps()) < NUM_STEPS
    following = Job(cluster, tmp_path / "job", "0", "last")
    following.wait_until("COMPLETED")
    check_each_once(following, undisturbed)


def test_an_elastic_job_goes_on_without_a_node_that_is_set_down(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    kept = ("--no-kill",)
    job = Job(cluster, tmp_path / "job", "0.3", scheme="elastic", srun=kept, sbatch=kept)
    job.wait_for_steps(5)
    cluster.say("scontrol", "update", "NodeName=host-b", "State=DOWN", "Reason=test")
    job.wait_for(lambda: {step for _, step, _ in job.steps()} == set(range(1, NUM_STEPS + 1)))
    assert "rank 1 " in job.said()


def test_tasks_of_a_job_array_meet_at_ports_of_their_own(
    cluster: SlurmCluster, tmp_path: Path, undisturbed: list[float]
) -> None:
    folders = [tmp_path / f"job{number}" for number in range(2)]
    for folder in folders:
        folder.mkdir()
    program = [sys.executable, "-m", "tests.hosts.slurm_job", "zero3"]
    script = tmp_path / "array.sh"
    told = f'{tmp_path}/job"$SLURM_ARRAY_TASK_ID" 0.2'
    options = "".join(f"#SBATCH {one}\n" for one in (*_TWO_NODES, "--array=0-1"))
    script.write_text(f"#!/bin/sh\n{options}srun {' '.join(program)} {told}\n")
    cluster.say("sbatch", str(script))
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while min(len(steps_in(folder)) for folder in folders) < NUM_STEPS:
        assert time.monotonic() < deadline, [steps_in(folder) for folder in folders]
        time.sleep(0.2)
    ports = [{port for *_, port in steps_in(folder)} for folder in folders]
    assert [len(one) for one in ports] == [1, 1]
    assert ports[0] != ports[1]
    for folder in folders:
        losses = [float(loss) for _, _, loss, _ in steps_in(folder)]
        assert losses == pytest.approx(undisturbed, rel=1e-5)
