"""Who a rank of mpirun is: by the launcher's variables, by MPI, and by both."""

import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from lightning_shard.core import settings
from lightning_shard.environments import mpi
from lightning_shard.environments.mpi import MPIEnvironment
from lightning_shard.errors import ConfigError
from tests.environments.variables import CRAY_PMI, HYDRA, OPEN_MPI, names_of, set_only
from tests.mpirun import run_mpi, run_mpi_command

LAUNCHERS = {"open_mpi": OPEN_MPI, "hydra": HYDRA, "cray_pmi": CRAY_PMI}


@dataclass
class FakeComm:
    """COMM_WORLD as one rank sees it, where `hosts[rank]` is each rank's host."""

    rank: int
    hosts: list[str]
    sent: list[Any] = field(default_factory=list)

    def Get_rank(self) -> int:  # noqa: N802
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return len(self.hosts)

    def Split_type(self, kind: int) -> "FakeComm":  # noqa: N802
        host = self.hosts[self.rank]
        return FakeComm(self.hosts[: self.rank].count(host), [host] * self.hosts.count(host))

    def Free(self) -> None:  # noqa: N802
        """Nothing is held."""

    def bcast(self, value: Any) -> Any:
        if len(set(self.hosts)) == 1 and isinstance(value, int):  # within a host
            return self.first
        self.sent.append(value)
        return value

    def allgather(self, value: int) -> list[int]:
        return [self.hosts.index(host) for host in self.hosts]

    first = 0


@pytest.fixture
def without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)


@pytest.fixture
def on_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this be rank 1 of hosts b, a, a: the first rank on the second host."""

    class Host(FakeComm):
        first = 1

    class World(FakeComm):
        def Split_type(self, kind: int) -> FakeComm:  # noqa: N802
            return Host(0, ["a", "a"])

    monkeypatch.setattr(mpi, "_comm_world", lambda: World(1, ["b", "a", "a"]))


def describe() -> tuple[Any, ...]:
    environment = MPIEnvironment()
    return (
        (environment.global_rank(), environment.world_size(), environment.local_size),
        (environment.local_rank(), environment.node_rank()),
        (environment.main_address, environment.main_port),
    )


def describe_without_variables() -> tuple[Any, ...]:
    settings.mpi_variables = lambda: None
    return describe()


def raise_of_a_wrong_port() -> str:
    with pytest.raises(ConfigError) as raised:
        _ = MPIEnvironment().main_port
    return str(raised.value)


@pytest.mark.usefixtures("without_mpi4py")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_variables_are_enough_on_one_host(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(
        monkeypatch, LAUNCHERS[launcher] | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    )
    assert MPIEnvironment.detect()
    assert describe() == ((1, 2, 2), (1, 0), ("localhost", 29500))
    environment = MPIEnvironment()
    assert environment.creates_processes_externally
    environment.set_global_rank(7)
    environment.set_world_size(7)
    assert (environment.global_rank(), environment.world_size()) == (1, 2)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("variable", ["world_size", "local_size"])
def test_a_missing_or_wrong_variable(
    launcher: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = LAUNCHERS[launcher]
    name: str = getattr(names_of(variables), variable)
    for value, message in ((None, "is not set"), ("x", "is 'x'"), ("1", "is 1; expected 0 <= ")):
        set_only(monkeypatch, variables | {name: value})
        with pytest.raises(ConfigError, match=f"{name} {message}"):
            MPIEnvironment()


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"])
def test_half_of_open_mpis_variables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, OPEN_MPI | {name: None})
    with pytest.raises(ConfigError, match=f"{name} is not set"):
        MPIEnvironment()


def test_a_rank_of_srun_is_none_of_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, {"PMI_RANK": "1", "PMI_SIZE": "2"})  # srun --mpi=pmi2
    assert not MPIEnvironment.detect()


@pytest.mark.usefixtures("without_mpi4py")
def test_without_an_address_mpi4py_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, OPEN_MPI)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR is not set.* Or install mpi4py"):
        _ = MPIEnvironment().main_address


@pytest.mark.usefixtures("without_mpi4py")
def test_on_several_hosts_mpi4py_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"})
    with pytest.raises(ConfigError, match=r"Rank 1: OMPI_COMM_WORLD_SIZE is 4 .* Install mpi4py"):
        MPIEnvironment()


def test_another_mpi_than_mpiruns(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpi4py with a library of its own believes that it is alone."""
    monkeypatch.setattr(mpi, "_comm_world", lambda: FakeComm(0, ["a"]))
    set_only(monkeypatch, OPEN_MPI)
    with pytest.raises(ConfigError, match=r"OMPI_COMM_WORLD_SIZE is 2, .* another MPI"):
        MPIEnvironment()


@pytest.mark.usefixtures("on_two_hosts")
def test_hosts_are_numbered_by_their_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning numbers them by name: rank 0 would be on node 1."""
    changes = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    for variables in (OPEN_MPI | changes, {}):
        set_only(monkeypatch, variables)
        environment = MPIEnvironment()
        assert (environment.global_rank(), environment.local_rank()) == (1, 0)
        assert (environment.node_rank(), environment.local_size) == (1, 2)
        with pytest.raises(
            ConfigError, match=r"mpirun started ranks on 2 host\(s\), but .*pass num"
        ):
            environment.validate_settings(2, 1)
        with pytest.raises(ConfigError, match=r"3 rank\(s\) .* makes 4"):
            environment.validate_settings(2, 2)


@pytest.mark.usefixtures("without_mpi4py")
def test_another_number_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, OPEN_MPI)
    environment = MPIEnvironment()
    environment.validate_settings(2, 1)
    with pytest.raises(
        ConfigError,
        match=r"mpirun started 2 rank\(s\) on this host \(OMPI_COMM_WORLD_LOCAL_SIZE=2\), but "
        r"Trainer\(devices=4\): pass devices=2, or start `mpirun -n 4 python",
    ):
        environment.validate_settings(4, 1)


@pytest.mark.usefixtures("without_mpi4py")
def test_without_mpirun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, {})
    assert not MPIEnvironment.detect()
    environment = MPIEnvironment()
    assert (environment.global_rank(), environment.world_size()) == (0, 1)
    assert environment.main_address == "127.0.0.1"
    assert environment.main_port == environment.main_port > 0
    environment.validate_settings(1, 1)
    with pytest.raises(ConfigError, match=r"No mpirun has started .* Start `mpirun -n 4 python"):
        environment.validate_settings(2, 2)


@pytest.mark.parametrize("host", ["127.0.0.1", "node-1"])
def test_a_free_port_of_rank_0(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_only(monkeypatch, {})
    place = mpi._own_rendezvous(host)
    assert isinstance(place, settings.Rendezvous)
    assert (place.host, place.port > 0) == (host, True)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("function", [describe, describe_without_variables])
def test_under_mpirun(function: Any) -> None:
    ranks = run_mpi(function, 3)
    assert [one[0] for one in ranks] == [(rank, 3, 3) for rank in range(3)]
    # Open MPI numbers the ranks of an oversubscribed host in the order of its cores.
    assert sorted(one[1] for one in ranks) == [(local_rank, 0) for local_rank in range(3)]
    assert len({one[2] for one in ranks}) == 1
    assert ranks[0][2][0] == "127.0.0.1"


@pytest.mark.mpi
@pytest.mark.slow
def test_every_rank_hears_of_rank_0s_wrong_port() -> None:
    messages = run_mpi(raise_of_a_wrong_port, 2, variables={"MASTER_PORT": "no"})
    assert len(messages) == 2
    assert all("MASTER_PORT is 'no'" in message for message in messages)


def fail_on_rank_one() -> None:
    MPIEnvironment()
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        raise ValueError("rank one had enough")
    time.sleep(600)


@pytest.mark.slow
@pytest.mark.mpi
def test_a_rank_that_fails_does_not_wait_for_the_others() -> None:
    """The interpreter's end ran MPI_Finalize, which waits for every rank: no word, no end."""
    code = f"import {__name__} as tests; tests.fail_on_rank_one()"
    finished = run_mpi_command([sys.executable, "-c", code], 2)
    assert finished[0].returncode == 1
    assert "rank one had enough" in finished[1].output
