"""Real launchers start real ranks, which train as a single device does."""

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.environments.program import train
from tests.mpirun import OF_LAUNCHERS, run_mpi_command
from tests.processes import (
    WARNING_FILTERS,
    WARNINGS_ARE_ERRORS,
    Finished,
    check,
    free_port,
    run_commands,
)
from tests.strategies.parity import ignoring

pytestmark = ignoring()

PROGRAM = ("-m", "tests.environments.program")


@cache
def single_device() -> dict[str, torch.Tensor]:
    return train()["weights"]


def alone(command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Return the command, run with `variables` and without those of this project's harness."""
    unset = [word for name in OF_LAUNCHERS for word in ("-u", name)]
    return ["env", *unset, *(f"{name}={value}" for name, value in variables.items()), *command]


def run(commands: Sequence[Sequence[str]]) -> list[Finished]:
    return run_commands(commands, timeout_seconds=100)


def program(folder: Path, strategy: str, devices: int, num_nodes: int) -> tuple[str, ...]:
    options = (str(folder), strategy, str(devices), str(num_nodes))
    return (sys.executable, *WARNINGS_ARE_ERRORS, *PROGRAM, *options)


def agents(folder: Path, rendezvous: str, num_local: int) -> list[list[str]]:
    """Return the commands of two torchrun agents that stand for two hosts."""
    port = free_port()
    words = {
        "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"],
        "static": ["--master-addr=127.0.0.1", f"--master-port={port}"],
    }[rendezvous]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", *words]
    options = ["--local-addr=127.0.0.1", f"--nproc-per-node={num_local}", "--no-python"]
    return [
        alone(
            [*torchrun, f"--node-rank={node}", *options, *program(folder, "zero2", num_local, 2)],
            {},
        )
        for node in range(2)
    ]


def tasks(folder: Path, num_nodes: int) -> list[list[str]]:
    """Return two tasks with the variables that srun sets, on one host or on two."""
    per_node = 2 // num_nodes
    common = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NPROCS": "2",
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_NNODES": str(num_nodes),
        "SLURM_NODELIST": ",".join(["localhost"] * num_nodes),
        "MASTER_PORT": str(free_port()),  # the job's would be 19711, free or not
    }
    return [
        alone(
            program(folder, "zero2", per_node, num_nodes),
            common
            | {
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank % per_node),
                "SLURM_NODEID": str(rank // per_node),
            },
        )
        for rank in range(2)
    ]


def assert_trained(
    folder: Path, environment: str, places: Sequence[tuple[int, int, int, int]]
) -> None:
    """Compare each rank's (rank, world size, local rank, node) and weights."""
    results: list[dict[str, Any]] = [torch.load(file) for file in sorted(folder.glob("rank_*.pt"))]
    assert [one["place"] for one in results] == list(places)
    assert {one["environment"] for one in results} == {environment}
    for result in results:
        torch.testing.assert_close(result["weights"], single_device(), rtol=1e-5, atol=2e-7)


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["c10d", pytest.param("static", marks=pytest.mark.slow)])
def test_two_agents_of_torchrun(rendezvous: str, tmp_path: Path) -> None:
    check(run(agents(tmp_path, rendezvous, 1)))
    assert_trained(tmp_path, "TorchElasticEnvironment", [(0, 2, 0, 0), (1, 2, 0, 1)])


@pytest.mark.slow
def test_two_agents_with_two_ranks_each(tmp_path: Path) -> None:
    check(run(agents(tmp_path, "static", 2)))
    places = [(0, 4, 0, 0), (1, 4, 1, 0), (2, 4, 0, 1), (3, 4, 1, 1)]
    assert_trained(tmp_path, "TorchElasticEnvironment", places)


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_tasks_of_srun(num_nodes: int, tmp_path: Path) -> None:
    check(run(tasks(tmp_path, num_nodes)))
    places = {1: [(0, 2, 0, 0), (1, 2, 1, 0)], 2: [(0, 2, 0, 0), (1, 2, 0, 1)]}
    assert_trained(tmp_path, "SLURMEnvironment", places[num_nodes])


@pytest.mark.slow
def test_lightning_starts_the_other_ranks(tmp_path: Path) -> None:
    check(
        run(
            [alone(program(tmp_path, "zero2", 2, 1), {"PYTHONWARNINGS": ",".join(WARNING_FILTERS)})]
        )
    )
    assert_trained(tmp_path, "LightningEnvironment", [(0, 2, 0, 0), (1, 2, 1, 0)])


@pytest.mark.slow
def test_ranks_started_by_hand(tmp_path: Path) -> None:
    check(run([program(tmp_path, "zero2", 2, 1)] * 2))  # with RANK, LOCAL_RANK, WORLD_SIZE ...
    assert_trained(tmp_path, "LightningEnvironment", [(0, 2, 0, 0), (1, 2, 1, 0)])


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])  # "auto" means 1
def test_ranks_of_mpirun(devices: int, tmp_path: Path) -> None:
    check(run_mpi_command(program(tmp_path, "zero2_gloo", devices, 1), 2))
    assert_trained(tmp_path, "MPIEnvironment", [(0, 2, 0, 0), (1, 2, 1, 0)])


@pytest.mark.mpi
@pytest.mark.slow
def test_ranks_of_mpirun_inside_a_slurm_job(tmp_path: Path) -> None:
    """Lightning takes srun's numbers, which are those of mpirun's daemon on each host."""
    job = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "0"}
    command = program(tmp_path, "zero2", 2, 1)
    check(run_mpi_command(command, 2, variables=job | {"SLURM_LOCALID": "0", "SLURM_NODEID": "0"}))
    assert_trained(tmp_path, "MPIEnvironment", [(0, 2, 0, 0), (1, 2, 1, 0)])


@pytest.mark.slow
@pytest.mark.mpi
def test_another_number_of_ranks_of_mpirun_is_refused(tmp_path: Path) -> None:
    finished = run_mpi_command(program(tmp_path, "zero2_gloo", 3, 1), 2)
    assert finished[0].returncode
    assert "OMPI_COMM_WORLD_LOCAL_SIZE=2" in "".join(one.output for one in finished)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_another_number_of_ranks_of_torchrun_is_refused(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    command = [*torchrun, "--nproc-per-node=1", *program(tmp_path, "zero2", 2, 1)]
    (finished,) = run([alone(command, {})])
    assert finished.returncode
    assert "ConfigError: Rank 0: torchrun started 1 rank(s)" in finished.output
    assert "LOCAL_WORLD_SIZE=1" in finished.output
