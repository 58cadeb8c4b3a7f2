"""Interfaces that are not there, and places that are not reached, are told."""

import socket
from pathlib import Path

import pytest

from lightning_shard.tools.doctor import communication
from lightning_shard.tools.doctor.host import Finding


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "eth1")])


def findings() -> dict[str, Finding]:
    return {one.subject: one for one in communication.network()}


def test_the_loopback_interface_is_tried() -> None:
    assert findings()["ports"].state == "ok"


def test_a_loopback_interface_that_is_down_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(socket, "create_connection", refused)
    assert findings()["ports"].state == "failure"


@pytest.mark.parametrize(
    ("variable", "chosen", "state"),
    [
        ("GLOO_SOCKET_IFNAME", "eth1", "ok"),
        ("GLOO_SOCKET_IFNAME", "eth", "failure"),  # Gloo takes whole names
        ("GLOO_SOCKET_IFNAME", "ib0,eth0", "ok"),
        ("NCCL_SOCKET_IFNAME", "eth", "ok"),  # NCCL takes beginnings
        ("NCCL_SOCKET_IFNAME", "=eth", "failure"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "ok"),
        ("NCCL_SOCKET_IFNAME", "ib", "failure"),
    ],
)
def test_an_interface_that_is_chosen_must_be_there(
    variable: str, chosen: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, chosen)
    assert findings()[variable].state == state


def test_a_port_that_somebody_has_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        assert findings()["MASTER_ADDR"].state == "warning"
    assert findings()["MASTER_ADDR"].state == "ok"


def test_an_address_without_a_port_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    found = findings()["MASTER_ADDR"]
    assert found.state == "warning"
    assert "MASTER_PORT" in found.found


def test_a_host_without_an_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def unknown(host: str, *args: object, **options: object) -> object:
        if host == socket.gethostname():
            raise socket.gaierror("unknown")
        return real(host, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert findings()["host name"].state == "warning"


def port(folder: Path, name: str, rate: str, state: str = "4: ACTIVE") -> None:
    place = folder / name / "ports" / "1"
    place.mkdir(parents=True)
    (place / "rate").write_text(rate)
    (place / "state").write_text(state)


def test_infiniband_ports_that_are_up_count_together(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", "400 Gb/sec (4X NDR)\n")
    port(tmp_path, "mlx5_1", "400 Gb/sec (4X NDR)\n")
    port(tmp_path, "mlx5_2", "400 Gb/sec (4X NDR)\n", "1: DOWN")
    found = communication.adapter_speed(tmp_path, tmp_path / "net")
    assert found is not None
    assert found[0] == 100e9


@pytest.mark.parametrize(("speed", "expected"), [("25000", 3.125e9), ("-1", None)])
def test_without_any_the_interface_outward_counts(
    speed: str, expected: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communication, "outward", lambda: ("eth7", "192.0.2.5"))
    (tmp_path / "eth7").mkdir()
    (tmp_path / "eth7" / "speed").write_text(speed)
    found = communication.adapter_speed(tmp_path / "none", tmp_path)
    assert (None if found is None else found[0]) == expected
