"""Messages over a stream, however they are cut, and ends of streams."""

import socket
from collections.abc import Iterator

import pytest

from lightning_shard.backends.authentication.connection import Connection


@pytest.fixture
def ends() -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    connection = Connection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


def test_messages_arrive_in_order_however_they_are_cut(
    ends: tuple[Connection, socket.socket],
) -> None:
    connection, other = ends
    other.sendall(b'{"kind": "a"}\n{"ki')
    assert connection.receive() == [{"kind": "a"}]
    other.sendall(b'nd": "b"}\n')
    assert connection.receive() == [{"kind": "b"}]
    assert connection.receive() == []
    assert connection.is_open


def test_the_last_words_are_read_before_the_end(ends: tuple[Connection, socket.socket]) -> None:
    connection, other = ends
    other.sendall(b'{"kind": "bye"}\n')
    other.close()
    assert connection.receive() == [{"kind": "bye"}]
    assert not connection.is_open


@pytest.mark.parametrize(
    "text", [b"GET / HTTP/1.1\r\n", b"[1, 2]\n", b"\xff\n", b"[" * 100_000 + b"\n"]
)
def test_what_is_no_message_ends_the_connection(
    ends: tuple[Connection, socket.socket], text: bytes
) -> None:
    connection, other = ends
    other.sendall(text)
    assert connection.receive() == []
    assert not connection.is_open


def test_what_the_system_does_not_take_at_once_is_sent_later(
    ends: tuple[Connection, socket.socket],
) -> None:
    connection, other = ends
    long = {"kind": "table", "table": "x" * 4_000_000}
    reader = Connection(other)
    connection.send(long)
    assert connection.has_unsent
    received = []
    while not received:
        received = reader.receive()
        connection.flush()
    assert received == [long]
    assert not connection.has_unsent


def test_sending_to_who_has_gone_is_no_error(ends: tuple[Connection, socket.socket]) -> None:
    connection, other = ends
    other.close()
    for _ in range(3):
        connection.send({"kind": "beat"})
    assert not connection.has_unsent
