"""The job's keys and values, and the connections through which ranks ask for them."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from selectors import BaseSelector
from typing import Any

from typing_extensions import override

from lightning_shard.backends._c10d import StoreBase
from lightning_shard.backends.authentication.connection import Connection, Message, Served


class KeyValues:
    """Keys and their values, which are strings of one character for each byte."""

    def __init__(self, on_change: Callable[[], object] = lambda: None) -> None:
        self._on_change = on_change
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
        """Return the answer to a request; None as long as it has to wait."""
        request = dict(message)
        kind = request.pop("kind")
        if kind == "get":
            keys = request["keys"]
            is_set = self._check(keys)
            return {"answer": [self._values[key] for key in keys]} if is_set else None
        return {"answer": self._requests[kind](**request)}

    def _set(self, values: dict[str, str]) -> None:
        for key, value in values.items():
            self._put(key, str(value))

    def _put(self, key: str, value: str) -> None:
        self._values[key] = value
        self._on_change()

    def _add(self, key: str, value: int) -> int:
        total = int(self._values.get(key, "0")) + int(value)
        self._put(key, str(total))
        return total

    def _append(self, key: str, value: str) -> None:
        self._put(key, self._values.get(key, "") + str(value))

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._put(key, str(desired))
        return self._values.get(key, expected)

    def _delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


class RequestStore(StoreBase):
    """A store of c10d, whose C++ calls it too; its calls are requests that `KeyValues` answers."""

    @abstractmethod
    def _ask(self, kind: str, **told: Any) -> Any:
        """Return the answer to a request."""

    @abstractmethod
    def _get(self, keys: Sequence[str], timeout: timedelta | None) -> list[str]:
        """Return the values of keys, once all are set."""

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        """Add to a counter and return its new value."""
        return int(self._ask("add", key=key, value=value))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        self._ask("append", key=key, value=_sent(value))

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set a key if it has the expected value, or is absent and "" is expected."""
        expected, desired = _sent(expected_value), _sent(desired_value)
        return _received(self._ask("compare_set", key=key, expected=expected, desired=desired))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return bool(self._ask("check", keys=list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set, or raise `DistStoreError` if they are not in time."""
        self._get(keys, timeout)

    def delete_key(self, key: str) -> bool:
        """Forget a key; return whether it was set."""
        return bool(self._ask("delete", key=key))

    def num_keys(self) -> int:
        """Return the number of keys that are set."""
        return int(self._ask("count"))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several keys and return their values."""
        return [_received(value) for value in self._get(keys, None)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        told = {key: _sent(value) for key, value in zip(keys, values, strict=True)}
        self._ask("set", values=told)

    def has_extended_api(self) -> bool:
        """Say that append and the multi-key calls are there."""
        return True

    deleteKey = delete_key  # noqa: N815 - c10d's name
    getNumKeys = num_keys  # noqa: N815 - c10d's name


def _sent(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def _received(value: str) -> bytes:
    return value.encode("latin-1")


class KeyValueService(Served):
    """Serves `KeyValues` over sealed connections."""

    def __init__(self, selector: BaseSelector) -> None:
        super().__init__(selector)
        self._key_values = KeyValues()
        self._waiting: dict[Connection, Message] = {}

    @override
    def _take(self, connection: Connection, message: Message) -> bool:
        answer = self._key_values.answer(message)
        if answer is None:
            self._waiting[connection] = message
            return True
        connection.send(answer)
        if message["kind"] not in ("get", "check", "count"):
            self._answer_waiting()
        return True

    def _answer_waiting(self) -> None:
        for connection, message in list(self._waiting.items()):
            if (answer := self._key_values.answer(message)) is not None:
                del self._waiting[connection]
                connection.send(answer)

    @override
    def _lost(self, connection: Connection, owner: Any) -> None:
        self._waiting.pop(connection, None)
