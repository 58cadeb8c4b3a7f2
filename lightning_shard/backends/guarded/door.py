"""The door of a service: who connects is a stranger until it has proved that it knows the token.

    accept ──> stranger ──proof──> admitted: another's from now on
                   └── nothing for ten seconds, a long line, a wrong proof, one stranger too many:
                       closed

A stranger costs a socket and a kilobyte, for ten seconds at most. When there are too many, the one
that has waited longest goes: a rank proves itself in a moment, and comes again if it was closed.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from selectors import EVENT_READ, BaseSelector
from time import monotonic

from lightning_shard.backends.guarded.connection import Connection
from lightning_shard.backends.guarded.handshake import LONGEST_LINE_BYTES, Listening

PATIENCE_SECONDS = 10.0
MOST_STRANGERS = 128
_MOST_AT_ONCE = 64


class Door:
    """Accepts connections for whoever owns the selector, and hands on the admitted ones.

    Args:
        listeners: The sockets that listen.
        token: The job's token.
        selector: Selector of the thread; each socket is registered with the function to call when
            it is ready.
        admit: Maps each service that connections may come for to the function that takes a sealed
            connection, which is in no selector then.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        token: str,
        selector: BaseSelector,
        admit: Mapping[str, Callable[[Connection], None]],
    ) -> None:
        self._listeners = listeners
        self._token = token
        self._selector = selector
        self._admit = admit
        self._strangers: dict[Connection, tuple[Listening, float]] = {}  # in order of their coming
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, EVENT_READ, partial(self._accept, listener))

    def tick(self, now: float) -> None:
        """Close the strangers that have waited for too long; to be called every few seconds."""
        for connection, (_, since) in list(self._strangers.items()):
            if now - since <= PATIENCE_SECONDS:
                return
            self._turn_away(connection)

    def close(self) -> None:
        """Close every socket that is still the door's; in a forked child, too."""
        for listener in self._listeners:
            listener.close()
        for connection in self._strangers:
            connection.close()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                stream, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # gone before it was greeted, or no descriptor is left
                self._make_room(len(self._strangers) // 2)
                return
            self._make_room(MOST_STRANGERS - 1)
            self._greet(stream)

    def _greet(self, stream: socket.socket) -> None:
        connection = Connection(stream, LONGEST_LINE_BYTES)
        handshake = Listening(self._token)
        self._strangers[connection] = handshake, monotonic()
        self._selector.register(connection, EVENT_READ, partial(self._read, connection))
        connection.send(handshake.challenge)

    def _make_room(self, num_stay: int) -> None:
        for connection in list(self._strangers)[: max(0, len(self._strangers) - num_stay)]:
            self._turn_away(connection)

    def _read(self, connection: Connection) -> None:
        if connection not in self._strangers:  # turned away by an event of the same moment
            return
        messages = connection.receive()
        if messages and connection.is_open:
            handshake, _ = self._strangers[connection]
            service = handshake.answer(connection, messages[0])
            if service is not None and service in self._admit and len(messages) == 1:
                self._forget(connection)
                self._admit[service](connection)
                return
        if messages or not connection.is_open:
            self._turn_away(connection)

    def _turn_away(self, connection: Connection) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: Connection) -> None:
        del self._strangers[connection]
        self._selector.unregister(connection)
