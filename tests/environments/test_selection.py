"""When Lightning's own choice of a cluster environment stands, and when ours takes its place."""

import os
import subprocess
import sys
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment as LightningMPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightning_shard import ZeRO2Strategy
from lightning_shard.core import settings
from lightning_shard.environments import fitting_environment
from lightning_shard.environments.mpi import MPIEnvironment
from lightning_shard.errors import ConfigError
from tests.environments.variables import OPEN_MPI, SLURM, TORCHRUN, set_only
from tests.processes import run_alone


@pytest.fixture(autouse=True)
def without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher's variables that a test has set would contradict the real MPI."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)


def bare(kind: type[Any]) -> Any:
    return object.__new__(kind)


@pytest.mark.parametrize(
    ("found", "variables", "uses_mpi", "expected"),
    [
        (LightningEnvironment, {}, False, LightningEnvironment),
        (LightningEnvironment, {}, True, MPIEnvironment),
        (LightningEnvironment, OPEN_MPI, False, MPIEnvironment),
        (LightningMPIEnvironment, OPEN_MPI, False, MPIEnvironment),
        (MPIEnvironment, OPEN_MPI, True, MPIEnvironment),
        (SLURMEnvironment, SLURM, False, SLURMEnvironment),
        (SLURMEnvironment, SLURM | OPEN_MPI, False, MPIEnvironment),
        (TorchElasticEnvironment, TORCHRUN | OPEN_MPI, False, TorchElasticEnvironment),
        (LSFEnvironment, OPEN_MPI, False, LSFEnvironment),
        (LSFEnvironment, OPEN_MPI, True, MPIEnvironment),
    ],
)
def test_the_environment_in_use(
    found: type[Any],
    variables: dict[str, str],
    uses_mpi: bool,
    expected: type[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_only(monkeypatch, variables)
    assert type(fitting_environment(bare(found), uses_mpi=uses_mpi)) is expected


def test_mpi_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, TORCHRUN)
    with pytest.raises(ConfigError, match=r"TORCHELASTIC_RUN_ID is set.* Start `mpirun"):
        fitting_environment(TorchElasticEnvironment(), uses_mpi=True)


def test_srun_that_has_not_told_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each task would train alone."""
    set_only(monkeypatch, SLURM)
    with pytest.raises(ConfigError, match=r"SLURM_NTASKS is 4, but MPI\..* `srun --mpi=pmix"):
        fitting_environment(SLURMEnvironment(), uses_mpi=True)


@pytest.mark.parametrize("devices", [1, 2])
def test_ranks_of_mpirun_are_counted_on_cpus(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`devices="auto"` means 1 on CPUs."""
    set_only(monkeypatch, OPEN_MPI)
    trainer = L.Trainer(strategy="zero2", accelerator="cpu", devices=devices, logger=False)
    assert (trainer.world_size, trainer.global_rank, trainer.strategy.num_processes) == (2, 1, 2)


def test_ranks_of_mpirun_and_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, OPEN_MPI)
    strategy = ZeRO2Strategy(parallel_devices=[torch.device("cuda", 0)])
    strategy.cluster_environment = LightningEnvironment()
    with pytest.raises(ConfigError, match=r"OMPI_COMM_WORLD_LOCAL_SIZE=2\), but .*devices=1"):
        strategy.set_world_ranks()


@pytest.mark.slow
def test_a_run_without_mpirun_does_not_start_mpi() -> None:
    """A run without mpirun started MPI which listened on all addresses."""
    code = (
        "import sys, lightning_shard, lightning.pytorch as pl;"
        "pl.Trainer(accelerator='cpu', devices=1, logger=False, enable_checkpointing=False);"
        "assert 'mpi4py.MPI' not in sys.modules"
    )
    finished = run_alone("-c", code)
    assert finished.returncode == 0, finished.output


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMIX_RANK"])
def test_under_mpi_it_asks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in [one for one in os.environ if one.startswith(("OMPI_", "PMI_", "PMIX_", "MPI_"))]:
        monkeypatch.delenv(other)
    assert not settings.is_under_mpi()
    assert not LightningMPIEnvironment.detect()
    monkeypatch.setenv(name, "1")
    assert settings.is_under_mpi()


@pytest.mark.slow
def test_environments_may_be_imported_before_lightning() -> None:
    """The import of Lightning asked for a function of theirs, which was not there yet."""
    subprocess.run([sys.executable, "-c", "import lightning_shard.environments.ray"], check=True)
