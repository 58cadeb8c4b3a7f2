"""The job's keys and values, and the connections through which ranks ask for them.

A request is answered at once, but one for keys that are not set yet: that waits. Who gives up
closes the connection, and is forgotten.
"""

from collections.abc import Callable
from functools import partial
from selectors import EVENT_READ, BaseSelector

from lightning_shard.backends.guarded.connection import Connection, Message


class KeyValues:
    """Keys and their values, which are strings of one character for each byte."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._requests: dict[str, Callable[..., object]] = {
            "set": self._set,
            "add": self._add,
            "append": self._append,
            "compare_set": self._compare_set,
            "delete": self._delete,
            "check": self._check,
            "count": lambda: len(self._values),
        }

    def answer(self, message: Message) -> Message | None:
        """Return the answer to a request; None as long as it has to wait.

        Raises:
            KeyError, TypeError, ValueError: It is no request.
        """
        request = dict(message)
        kind = request.pop("kind")
        if kind == "get":
            keys = request["keys"]
            is_set = self._check(keys)
            return {"answer": [self._values[key] for key in keys]} if is_set else None
        return {"answer": self._requests[kind](**request)}

    def _set(self, values: dict[str, str]) -> None:
        self._values.update({str(key): str(value) for key, value in values.items()})

    def _add(self, key: str, value: int) -> int:
        total = int(self._values.get(key, "0")) + int(value)
        self._values[key] = str(total)
        return total

    def _append(self, key: str, value: str) -> None:
        self._values[key] = self._values.get(key, "") + str(value)

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._values[key] = str(desired)
        return self._values.get(key, expected)

    def _delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


class KeyValueService:
    """Serves `KeyValues` over sealed connections.

    Args:
        selector: Selector of the thread; each connection is registered with the function to call
            when it is ready.
    """

    def __init__(self, selector: BaseSelector) -> None:
        self._selector = selector
        self._key_values = KeyValues()
        self._waiting: dict[Connection, Message | None] = {}  # every connection, in order

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do."""
        return any(connection.has_unsent for connection in self._waiting)

    def flush(self) -> None:
        """Send what the system takes of the answers that have not left yet."""
        for connection in self._waiting:
            connection.flush()

    def admit(self, connection: Connection) -> None:
        """Serve a connection from now on."""
        self._waiting[connection] = None
        self._selector.register(connection, EVENT_READ, partial(self._read, connection))

    def close(self) -> None:
        """Close every connection."""
        for connection in self._waiting:
            connection.close()

    def _read(self, connection: Connection) -> None:
        for message in connection.receive():
            self._take(connection, message)
        if not connection.is_open:
            del self._waiting[connection]
            self._selector.unregister(connection)
            connection.close()

    def _take(self, connection: Connection, message: Message) -> None:
        try:
            answer = self._key_values.answer(message)
        except (KeyError, TypeError, ValueError):  # no rank says so
            connection.is_open = False
            return
        if answer is None:
            self._waiting[connection] = message
            return
        connection.send(answer)
        if message["kind"] not in ("get", "check", "count"):
            self._answer_waiting()

    def _answer_waiting(self) -> None:
        for connection, message in self._waiting.items():
            if message is not None and (answer := self._key_values.answer(message)) is not None:
                self._waiting[connection] = None
                connection.send(answer)
