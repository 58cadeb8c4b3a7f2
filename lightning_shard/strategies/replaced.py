"""An attribute of one object replaced for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: object, name: str, value: Any) -> Iterator[None]:
    """Let `owner` have `value` of its own under `name`, whatever its class has."""
    own = vars(owner)
    had, before = name in own, own.get(name)
    own[name] = value
    try:
        yield
    finally:
        if had:
            own[name] = before
        else:
            own.pop(name, None)
