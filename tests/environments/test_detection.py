"""When Lightning asks MPI how many ranks there are."""

import os

import pytest
from lightning.fabric.plugins.environments import MPIEnvironment

from lightning_shard.core import settings
from tests.processes import run_alone


@pytest.mark.slow
def test_a_run_without_mpirun_started_mpi_which_listened_on_all_addresses() -> None:
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
    assert not MPIEnvironment.detect()
    monkeypatch.setenv(name, "1")
    assert settings.is_under_mpi()
