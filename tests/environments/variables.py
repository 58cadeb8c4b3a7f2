"""The variables of each launcher, as it sets them for one rank, and how to set them in a test."""

import os
from collections.abc import Mapping

import pytest

from lightning_shard.core import settings

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "train",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NODEID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "node[1-2]",
}
LIGHTNING = {
    "LOCAL_RANK": "1",
    "NODE_RANK": "0",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "node-1",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
CRAY_PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL", "SLURM_")
ALL = {*TORCHRUN, *LIGHTNING}


def set_only(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str | None]) -> None:
    """Set `variables`, leave out those that are None, and unset every other launcher's."""
    for name in (*ALL, *(name for name in os.environ if name.startswith(PREFIXES))):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        if value is not None:
            monkeypatch.setenv(name, value)


def names_of(variables: Mapping[str, str]) -> settings.LauncherVariables:
    """Return the table of the MPI launcher that sets these variables."""
    (names,) = [
        names
        for names in (settings.OPEN_MPI, settings.HYDRA, settings.CRAY_PMI)
        if {names.rank, names.world_size, names.local_rank, names.local_size} <= set(variables)
    ]
    return names
