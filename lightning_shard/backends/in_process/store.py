"""A key-value store in memory, whose waits let the other ranks run."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

from lightning_shard.backends._c10d import StoreBase
from lightning_shard.backends.call_site import CallSite, find_call_site
from lightning_shard.backends.in_process.scheduler import Scheduler


class StoreWorld(Protocol):
    """The part of a world that its ranks' store needs.

    Attributes:
        scheduler: The world's scheduler, which holds the ranks.
    """

    scheduler: Scheduler

    def wait_until(self, ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Let the other ranks run until `ready()`."""


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class InProcessStore(StoreBase):
    """The store of one world.

    c10d's C++ (`PrefixStore`, its own barriers) calls these methods too, some by camel-case names.
    Time-outs are not used: what can never come is a deadlock, and found at once.
    """

    def __init__(self, world: StoreWorld) -> None:
        super().__init__()
        self._world = world
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set the value of a key."""
        self._put(key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        """Add to a counter and return its new value."""
        total = int(self._values.get(key, b"0")) + value
        self._put(key, str(total).encode())
        return total

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        self._put(key, self._values.get(key, b"") + _as_bytes(value))

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set a key if it has the expected value, or is absent and "" is expected."""
        expected = _as_bytes(expected_value)
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._put(key, _as_bytes(desired_value))
        return self._values.get(key, expected)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set; if not at once, the other ranks run once before the answer."""
        if not self._has(keys):
            site = find_call_site()
            self._world.scheduler.yield_token(lambda: _describe("check", keys, site))
        return self._has(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Let the other ranks run until all keys are set."""
        del timeout
        if not self._has(keys):
            site = find_call_site()
            self._world.wait_until(lambda: self._has(keys), lambda: _describe("wait", keys, site))

    def delete_key(self, key: str) -> bool:
        """Forget a key; return whether it was set."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys that are set."""
        return len(self._values)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several keys and return their values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Say that append and the multi-key calls are there."""
        return True

    deleteKey = delete_key  # noqa: N815 - c10d's name
    getNumKeys = num_keys  # noqa: N815 - c10d's name

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._world.scheduler.note_progress()

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)


def _describe(method: str, keys: Sequence[str], site: CallSite) -> str:
    return f"store.{method}({', '.join(keys)}) at {site}"
