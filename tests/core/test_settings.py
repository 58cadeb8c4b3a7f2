"""Reading the environment."""

import os
import socket

import pytest

from lightning_shard.core import settings
from lightning_shard.errors import ConfigError
from tests.environments.variables import (
    CRAY_PMI,
    HYDRA,
    OPEN_MPI,
    SLURM,
    TORCHRUN,
    names_of,
    set_only,
)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("node-3", False)],
)
def test_rendezvous(monkeypatch: pytest.MonkeyPatch, host: str, is_loopback: bool) -> None:
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", "29500")
    place = settings.rendezvous()
    assert place == settings.Rendezvous(host=host, port=29500)
    assert settings.is_loopback(place.host) is is_loopback


@pytest.mark.parametrize(
    ("port", "message"),
    [
        (None, "variable MASTER_PORT is not set; expected a free port"),
        ("", "variable MASTER_PORT is not set"),
        ("http", "variable MASTER_PORT is 'http'; expected .* a whole number"),
        ("70000", "MASTER_PORT is 70000; expected a port, 1 to 65535"),
        ("0", "MASTER_PORT is 0"),
    ],
)
def test_a_wrong_port(monkeypatch: pytest.MonkeyPatch, port: str | None, message: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    if port is not None:
        monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ConfigError, match=message):
        settings.rendezvous()


def test_a_missing_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set; expected the host of rank 0"):
        settings.rendezvous()


def test_rank_and_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.setenv(name, "0" if name.endswith("RANK") else "1")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    place = settings.placement(settings.TORCHRUN)
    assert (place.rank, place.world_size) == (2, 3)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(
        ConfigError, match="RANK is 3 and WORLD_SIZE is 3; expected 0 <= RANK < WORLD_SIZE"
    ):
        settings.placement(settings.TORCHRUN)


def test_gloo_is_bound_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that the end of the test restores it
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    settings.prefer_loopback_for_gloo()
    assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")


def test_the_users_interface_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    settings.prefer_loopback_for_gloo()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_no_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "eth0")])
    settings.prefer_loopback_for_gloo()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_where_a_launcher_says_that_a_process_is(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, TORCHRUN)
    assert settings.placement(settings.TORCHRUN) == settings.ProcessRanks(
        rank=1, world_size=4, local_rank=1, local_size=2, node_rank=0, num_nodes=2
    )
    set_only(monkeypatch, OPEN_MPI)
    assert settings.placement(settings.OPEN_MPI) == settings.ProcessRanks(
        rank=1, world_size=2, local_rank=1, local_size=2
    )


@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA, CRAY_PMI])
def test_the_launcher_of_mpi_ranks_is_recognised(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_only(monkeypatch, variables)
    assert settings.mpi_variables() == names_of(variables)


@pytest.mark.parametrize("variables", [{}, TORCHRUN, SLURM, {"PMI_RANK": "0"}])
def test_no_launcher_of_mpi_ranks(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_only(monkeypatch, variables)
    assert settings.mpi_variables() is None


def test_only_what_is_set_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, {"SLURM_NTASKS": "2", "RANK": "x"})
    settings.check_numbers(settings.SLURM)
    monkeypatch.setenv("SLURM_NODEID", "first")
    with pytest.raises(ConfigError, match="SLURM_NODEID is 'first'; expected a number, as srun"):
        settings.check_numbers(settings.SLURM)


@pytest.mark.parametrize(("value", "expected"), [("", False), ("0", False), ("1", True)])
def test_debug(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("LIGHTNING_SHARD_DEBUG", value)
    assert settings.debug() is expected
