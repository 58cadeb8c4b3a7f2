"""Words for the state that an object is in, each with those that may follow it.

    class Light(State):
        RED = "GREEN"
        GREEN = "AMBER"
        AMBER = "RED"

    self.light = self.light.to(Light.GREEN)      raises in AMBER

A change that is not allowed is a mistake of this package, not of its user: debug runs raise there,
and so do tests. Other runs only assign.

What a thread does has a word as well: `asker`, for whom parameters show themselves.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, ClassVar, Self, TypeVar

MakesContext = Callable[[], AbstractContextManager[None]]
"""Makes a context, which is entered once."""

_S = TypeVar("_S", bound="State")
_T = TypeVar("_T")


@contextmanager
def having(variable: ContextVar[Any], value: _T) -> Iterator[_T]:
    """Let a variable of this thread have a value inside, and yield that."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@contextmanager
def setting(owner: Any, **values: Any) -> Iterator[None]:
    """Let attributes of an object have other values inside."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


class Asker(Enum):
    """Who asks a parameter for its elements: it looks full to user code, and to nobody else."""

    USER = "a step or a hook"
    LAYER = "the own forward of a layer of which ranks have parts, or what copies its weights"
    ENGINE = "this package, also where user code has called it"


asker: ContextVar[Asker] = ContextVar("asker", default=Asker.USER)
"""Who asks in this thread; threads of the user's, and loops between calls of Fabric, are user code.

Steps, hooks and backwards, in which blocks run again, set it, as do layers' own forwards, and what
user code calls that works with what this rank has.
"""


def user_asks() -> bool:
    """Whether user code asks now, in this thread."""
    return asker.get() is Asker.USER


class Checks:
    """Says whether changes are checked in all of this process: in debug runs and tests."""

    are_on: ClassVar[bool] = False


class State(Enum):
    """A state; a member's value names the members that may follow it: `then`."""

    then: frozenset[str]

    def __new__(cls, then: str) -> Self:
        """Make a member; several may have the same ones that follow."""
        member = object.__new__(cls)
        member._value_ = len(cls.__members__)
        member.then = frozenset(then.split())
        return member

    __hash__ = object.__hash__  # Enum's own is a call of Python

    def to(self, after: _S) -> _S:
        """Return the state that follows this one."""
        if Checks.are_on:
            assert after._name_ in self.then, f"{self} was changed to {after}"
        return after
