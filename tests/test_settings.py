"""Reading the environment."""

import os
import socket

import pytest

from lightning_shard import settings
from lightning_shard.errors import ConfigError


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("node-3", False)],
)
def test_rendezvous(monkeypatch: pytest.MonkeyPatch, host: str, is_loopback: bool) -> None:
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", "29500")
    place = settings.rendezvous()
    assert place == settings.Rendezvous(host=host, port=29500)
    assert place.is_loopback is is_loopback


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
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert settings.rank_and_world_size() == (2, 3)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match="RANK is 3 and WORLD_SIZE 3"):
        settings.rank_and_world_size()


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
