"""The arguments of one test on several ranks.

    fixture that needs `rank`, itself or through another   made on every rank, inside the world
    any other of the tests, of function scope              made once; ranks 1 .. N-1 get deep copies
    of wider scope, or of pytest and its plugins           made once and shared

So a model that a fixture builds is each rank's own, as with processes, and begins with the same
weights on all; and `monkeypatch`, `tmp_path` or a database of the session's stay what they are.

`_fixtureinfo` is private to pytest; the plugin's tests fail when it changes.
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from lightning_shard.errors import ConfigError

_OUR_MODULES = ("lightning_shard.testing.pytest_plugin", "_lightning_shard_pytest")
_MADE_PER_RANK = object()


@dataclass(frozen=True)
class RankCall:
    """The call of a test on one rank.

    Attributes:
        function: The test's function.
        values: Values of the fixtures that pytest made, by name.
    """

    function: Callable[..., Any]
    values: dict[str, Any]


class RankFixtures:
    """The fixtures of a test: those that each rank makes, and the values of the others.

    Args:
        item: A test that carries the marker.

    Raises:
        UsageError: A fixture that needs `rank` is not one that a rank can make.
    """

    def __init__(self, item: pytest.Function) -> None:
        self._item = item
        self._definitions = item._fixtureinfo.name2fixturedefs
        self._per_rank = [name for name in item.fixturenames if self._needs_rank(name)]
        for name in self._per_rank:
            self._check(name)

    def hide(self) -> None:
        """Have pytest skip the fixtures that the ranks make; called before pytest's setup."""
        self._item.funcargs.update(dict.fromkeys(self._per_rank, _MADE_PER_RANK))

    def calls(self, num_ranks: int) -> list[RankCall]:
        """Return each rank's call: rank 0 gets the original values, the others deep copies.

        Raises:
            ConfigError: A value cannot be copied.
        """
        values = {k: v for k, v in self._item.funcargs.items() if k not in self._per_rank}
        first = RankCall(self._item.obj, values)
        return [first, *(self._copy(first) for _ in range(1, num_ranks))]

    @contextmanager
    def made(self, rank: int, call: RankCall) -> Iterator[dict[str, Any]]:
        """Make the running rank's own fixtures; yield all arguments; tear its fixtures down."""
        values = dict(call.values)
        owner = getattr(call.function, "__self__", None)
        with ExitStack() as stack:
            for name in self._per_rank:
                self._make(name, rank, values, owner, stack)
            yield {name: values[name] for name in self._item._fixtureinfo.argnames}

    def _make(
        self, name: str, rank: int, values: dict[str, Any], owner: Any, stack: ExitStack
    ) -> None:
        if name in values:
            return
        definition = self._definitions[name][-1]
        if _is_rank(definition):
            values[name] = rank
            return
        for needed in definition.argnames:
            if needed in self._per_rank:
                self._make(needed, rank, values, owner, stack)
        function: Any = definition.func
        if inspect.ismethod(function) and isinstance(owner, type(function.__self__)):
            function = function.__func__.__get__(owner)
        arguments = {needed: values[needed] for needed in definition.argnames}
        if inspect.isgeneratorfunction(function):
            values[name] = stack.enter_context(contextmanager(function)(**arguments))
        else:
            values[name] = function(**arguments)

    def _needs_rank(self, name: str, asking: frozenset[str] = frozenset()) -> bool:
        definitions = self._definitions.get(name)
        if not definitions or name in asking:
            return False
        return _is_rank(definitions[-1]) or any(
            self._needs_rank(needed, asking | {name}) for needed in definitions[-1].argnames
        )

    def _check(self, name: str) -> None:
        definition = self._definitions[name][-1]
        if _is_rank(definition):
            return
        for wrong, what in (
            (definition.scope != "function", f"has scope {definition.scope!r}"),
            ("request" in definition.argnames or definition.params, "uses request or params"),
            (name in definition.argnames, "overrides one of its own name"),
        ):
            if wrong:
                raise pytest.UsageError(
                    f"{self._item.nodeid}: the fixture {name!r} needs 'rank', so that each rank "
                    f"makes it, but it {what}. Expected a plain fixture of scope 'function'."
                )

    def _copy(self, call: RankCall) -> RankCall:
        memo: dict[int, Any] = {
            id(value): value for name, value in call.values.items() if self._is_shared(name)
        }
        values = {name: self._copy_one(name, value, memo) for name, value in call.values.items()}
        owner = getattr(call.function, "__self__", None)
        if owner is None or inspect.isclass(owner):
            return RankCall(call.function, values)
        function: Any = call.function
        return RankCall(function.__func__.__get__(self._copy_one("self", owner, memo)), values)

    def _copy_one(self, name: str, value: Any, memo: dict[int, Any]) -> Any:
        try:
            return copy.deepcopy(value, memo)
        except Exception as error:
            raise ConfigError(
                f"{self._item.nodeid}: {name!r} cannot be copied for the ranks other than 0 "
                f"({type(error).__name__}: {error}). Have its fixture ask for 'rank', so that each "
                "rank makes its own, or give it a wider scope, so that the ranks share it."
            ) from error

    def _is_shared(self, name: str) -> bool:
        definitions = self._definitions.get(name)
        if not definitions:  # `request`
            return True
        if name in getattr(getattr(self._item, "callspec", None), "params", ()):
            return definitions[-1].scope != "function"
        package = definitions[-1].func.__module__.partition(".")[0]
        return definitions[-1].scope != "function" or package in self._plugin_packages()

    def _plugin_packages(self) -> set[str]:
        plugins = self._item.config.pluginmanager.list_plugin_distinfo()
        names = {getattr(plugin, "__name__", "").partition(".")[0] for plugin, _ in plugins}
        return names | {"_pytest"}


def _is_rank(definition: "pytest.FixtureDef[Any]") -> bool:
    return definition.argname == "rank" and definition.func.__module__ in _OUR_MODULES
