"""The hub's connections: which rank each belongs to."""

import socket
from collections.abc import Sequence
from functools import partial
from selectors import EVENT_READ, BaseSelector
from time import monotonic

from lightning_shard.backends.guarded.connection import Connection, Message
from lightning_shard.backends.guarded.door import Door
from lightning_shard.backends.liveness.hub import Hub

SERVICE = "lifeline"


class HubServer:
    """Serves a `Hub` behind a door; driven by the thread that owns the selector.

    Args:
        listeners: Where ranks connect; each says its rank first.
        token: The job's token, which a rank must know.
        world_size: Number of ranks.
        silence_seconds: A rank that says nothing for so long is given up by the hub.
        selector: Selector of the thread; each socket is registered with the function to call when
            it is ready.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        token: str,
        world_size: int,
        silence_seconds: float,
        selector: BaseSelector,
    ) -> None:
        self._world_size = world_size
        self._selector = selector
        self._connections: dict[Connection, int | None] = {}
        self._of_rank: dict[int, Connection] = {}
        self.hub = Hub(world_size, silence_seconds, self._tell, monotonic())
        self._door = Door(listeners, token, selector, {SERVICE: self.add})

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do."""
        return any(connection.has_unsent for connection in self._of_rank.values())

    def flush(self) -> None:
        """Send what the system takes of the messages to any rank that have not left yet."""
        for connection in self._of_rank.values():
            connection.flush()

    def add(self, connection: Connection) -> None:
        """Serve a new connection, which is a rank's once it has told its rank."""
        self._connections[connection] = None
        self._selector.register(connection, EVENT_READ, partial(self._read, connection))

    def tick(self, now: float) -> None:
        """Let time pass, for the hub and at the door."""
        self._door.tick(now)
        self.hub.tick(now)

    def leave(self) -> None:
        """Read what has come, rank 0's own last messages among it, and tell all ranks goodbye."""
        for connection in list(self._connections):
            self._read(connection)
        self.hub.leave()
        self.flush()

    def close(self) -> None:
        """Close every socket."""
        self._door.close()
        for connection in self._connections:
            connection.close()

    def _read(self, connection: Connection) -> None:
        for message in connection.receive():
            if self._connections[connection] is None:
                self._admit(connection, message)
            rank = self._connections[connection]
            if rank is not None:
                self.hub.heard(rank, message, monotonic())
        if not connection.is_open or self._connections[connection] is None:
            self._drop(connection)

    def _admit(self, connection: Connection, message: Message) -> None:
        rank = message.get("rank")
        if isinstance(rank, int) and 0 <= rank < self._world_size and rank not in self._of_rank:
            self._connections[connection] = rank
            self._of_rank[rank] = connection

    def _drop(self, connection: Connection) -> None:
        rank = self._connections.pop(connection)
        self._selector.unregister(connection)
        connection.close()
        if rank is not None:
            del self._of_rank[rank]
            self.hub.lost(rank, monotonic())

    def _tell(self, rank: int, message: Message) -> None:
        if rank in self._of_rank:
            self._of_rank[rank].send(message)
