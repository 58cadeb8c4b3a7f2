"""Where a job listens."""

import socket
from typing import Any

import pytest

from lightning_shard.backends.authentication import addresses
from lightning_shard.backends.authentication.addresses import address_towards, interface_of, listen


def test_a_job_of_one_host_listens_on_loopback_alone() -> None:
    for host, address in (("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "::1")):
        [listener] = listen(host, 0)
        with listener:
            assert listener.getsockname()[0] == address


@pytest.mark.parametrize(
    ("known_as", "listens_on"),
    [
        (["10.0.0.1"], ["10.0.0.1"]),
        (["10.0.0.1", "10.1.0.1", "fd00::1"], ["10.0.0.1", "10.1.0.1", "fd00::1"]),
        (["127.0.1.1", "10.0.0.1"], ["10.0.0.1"]),
        (["127.0.1.1"], [""]),
        ([], [""]),
    ],
)
def test_a_host_that_knows_itself_as_loopback_is_reached_by_others(
    known_as: list[str], listens_on: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that knows itself as loopback was not reached by others."""

    class Listener:
        def __init__(self, address: tuple[str, int], **_: Any) -> None:
            self.address = address

        def getsockname(self) -> tuple[str, int]:
            return self.address[0], 4000

    def found(*_: Any, **__: Any) -> list[Any]:
        families = [socket.AF_INET6 if ":" in one else socket.AF_INET for one in known_as]
        kind = socket.SOCK_STREAM
        return [(of, kind, 6, "", (one, 0)) for of, one in zip(families, known_as, strict=True)]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", found)
    monkeypatch.setattr(addresses.socket, "create_server", Listener)
    made: list[Any] = listen("node-1", 0)
    assert [one.address[0] for one in made] == listens_on
    assert [one.address[1] for one in made] == [0, *[4000] * (len(made) - 1)]


def test_the_interface_towards_a_host() -> None:
    assert address_towards("127.0.0.1", 0) == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("::1") in ("lo", None)  # None without IPv6
    assert interface_of("203.0.113.7") is None
