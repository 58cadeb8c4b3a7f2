"""Each scheme under each launcher, over two hosts: losses are those of one process's ranks."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.launching import LAUNCHERS, TOKEN
from tests.hosts.namespaces import NAMES, Hosts, named_hosts
from tests.hosts.page import MEASURED, TOLERANCE, WITHOUT, measurement
from tests.hosts.schemes import NUM_RANKS, NUM_STEPS, SCHEMES, in_process
from tests.hosts.slurm import SlurmCluster

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.timeout(2000),
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*num_workers.* argument"),
]
_PATIENCE_SECONDS = 900.0
_SAID_OF_HOSTS = {
    "tensor_parallel": "nodes of 2 ranks: 2; tp inside a node; dp across 2 nodes",
    "pipeline_parallel": "ParallelMesh(pp=4, dp=1, tp=1) on nodes of 2 ranks: 2; pp across 2 nodes",
    "hybrid_parallel": "nodes of 2 ranks: 2; tp inside a node; pp across 2 nodes",
}
_PER_HOST = NUM_RANKS // len(NAMES)


def run(launcher: str, hosts: Hosts, folder: Path, schemes: Sequence[str]) -> dict[str, Any]:
    """Train under the schemes; return what the ranks have written, by the files' names."""
    backend = "mpi" if launcher.endswith("MPI") else "gloo"
    program = ["-m", "tests.hosts.schemes", backend, str(_PER_HOST), str(len(NAMES)), str(folder)]
    variables = {"LIGHTNING_SHARD_JOB_TOKEN": TOKEN}
    if launcher == "srun":
        (folder / "slurm").mkdir()
        cluster = SlurmCluster(hosts, folder / "slurm")
        cluster.start()
        variables |= cluster.variables
    commands = LAUNCHERS[launcher](hosts, folder, [*program, *schemes], _PER_HOST)
    logs = [folder / f"log{host}" for host in range(len(commands))]
    processes = [
        hosts.start(host, command, variables, log)
        for host, (command, log) in enumerate(zip(commands, logs, strict=True))
    ]
    statuses = [process.wait(_PATIENCE_SECONDS) for process in processes]
    said = "".join(log.read_text(errors="replace") for log in logs)
    assert not any(statuses), said[-16000:]
    assert all(told in said for scheme, told in _SAID_OF_HOSTS.items() if scheme in schemes)
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("rank*.json")}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_losses_are_those_of_one_process(launcher: str, tmp_path: Path) -> None:
    told: dict[str, float] = {}
    tried = [scheme for scheme in SCHEMES if (scheme, launcher) not in WITHOUT]
    with named_hosts(tmp_path) as hosts:
        ranks = run(launcher, hosts, tmp_path, tried)
    assert [ranks[f"rank{rank}"]["host"] for rank in range(NUM_RANKS)] == [
        NAMES[rank // _PER_HOST] for rank in range(NUM_RANKS)
    ]
    for scheme in tried:
        told[scheme] = difference([ranks[rank]["losses"][scheme] for rank in ranks], scheme)
    MEASURED.mkdir(parents=True, exist_ok=True)
    measurement(launcher).write_text(json.dumps(told))
    assert max(told.values()) <= TOLERANCE, told


def test_layers_that_a_mapping_puts_across_hosts_are_told(tmp_path: Path) -> None:
    """The mesh said that they were inside a host, whatever `mpirun --map-by node` had done."""
    with named_hosts(tmp_path) as hosts:
        program = ["-m", "tests.hosts.schemes", "gloo", "2", "2", str(tmp_path), "hybrid_parallel"]
        [command] = LAUNCHERS["mpirun"](hosts, tmp_path, program, _PER_HOST)
        command[command.index("slot")] = "node"
        process = hosts.start(0, command, {}, tmp_path / "log")
        status, said = process.wait(_PATIENCE_SECONDS), (tmp_path / "log").read_text()
    assert status == 0, said
    assert "rank 0's host has ranks 0, 2. So 2 of 2 tp groups cross hosts" in said
    assert "tp inside a node" not in said


def difference(losses: Sequence[Sequence[float]], scheme: str) -> float:
    """Return the largest relative difference between a rank's loss and one process's."""
    expected = in_process(scheme)
    assert {len(one) for one in losses} == {len(expected)} == {NUM_STEPS}
    return max(
        abs(one - other) / abs(other)
        for curve in losses
        for one, other in zip(curve, expected, strict=True)
    )
