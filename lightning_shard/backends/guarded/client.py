"""Coming through a door: connecting, proving to know the token, asking and waiting for the answer.

A name may stand for several addresses, of which some may answer nobody (a filtered port): each is
tried in turn, for a few seconds, until one answers or the time is over.
"""

import select
import socket
from collections.abc import Callable, Iterator
from time import monotonic, sleep

from lightning_shard.backends.guarded.connection import Connection, Message
from lightning_shard.backends.guarded.handshake import (
    LONGEST_LINE_BYTES,
    Connecting,
    WrongTokenError,
)
from lightning_shard.backends.guarded.token import JobAddress

_RETRY_SECONDS = 0.05
_LONGEST_TRY_SECONDS = 5.0


def connect(
    address: JobAddress,
    service: str,
    patience_seconds: float,
    between_tries: Callable[[], object] = lambda: None,
) -> Connection:
    """Connect with a door, and wait for it if it is still to come.

    Args:
        address: Where the door is, and the job's token.
        service: The service that is asked for.
        patience_seconds: How long to try.
        between_tries: Called before each further try; raises if none has a chance.

    Returns:
        A sealed connection.

    Raises:
        WrongTokenError: Somebody listens there who does not know this token.
        OSError: Nobody has answered in time; the last error of the system.
    """
    deadline = monotonic() + patience_seconds
    while True:
        last: OSError | None = None
        for stream in _streams(address.host, address.port, deadline):
            if isinstance(stream, OSError):
                last = last or stream
                continue
            connection = Connection(stream, LONGEST_LINE_BYTES)
            try:
                _shake_hands(connection, Connecting(address.token, service), deadline)
                return connection
            except OSError as error:
                connection.close()
                if isinstance(error, WrongTokenError):
                    raise
                last = error
        if monotonic() + _RETRY_SECONDS > deadline:
            raise last or TimeoutError(f"nobody answers at {address.host}, port {address.port}")
        sleep(_RETRY_SECONDS)
        between_tries()


def ask(connection: Connection, message: Message, seconds: float) -> Message:
    """Send a message through a sealed connection, and wait for the one that answers it.

    Raises:
        TimeoutError: No answer came in time.
        ConnectionError: The other end has closed.
    """
    deadline = monotonic() + seconds
    connection.send(message)
    return next(_messages(connection, deadline))


def _streams(host: str, port: int, deadline: float) -> Iterator[socket.socket | OSError]:
    """Try each address; yield a stream, or the error of one that does not answer."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:  # a name that is still to be known (containers)
        yield error
        return
    for family, kind, protocol, _, address in found:
        seconds = min(deadline - monotonic(), _LONGEST_TRY_SECONDS)
        if seconds <= 0:
            return
        stream = socket.socket(family, kind, protocol)
        stream.settimeout(seconds)
        try:
            stream.connect(address)
        except OSError as error:
            stream.close()
            yield error
            continue
        yield stream


def _shake_hands(connection: Connection, handshake: Connecting, deadline: float) -> None:
    until = min(deadline, monotonic() + _LONGEST_TRY_SECONDS)
    for message in _messages(connection, until):
        if message.get("kind") == "refused":
            raise WrongTokenError("it refuses this token")
        if handshake.take(connection, message):
            return


def _messages(connection: Connection, deadline: float) -> Iterator[Message]:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while connection.is_open:
        seconds = deadline - monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out: no answer came")
        if connection.has_unsent:
            connection.flush()
            seconds = min(seconds, _RETRY_SECONDS)
        if poll.poll(1000 * seconds):
            yield from connection.receive()
    raise ConnectionResetError("connection closed by peer")
