"""Runs one test of pytest on every rank of an in-process world, and reports the ranks' errors."""

import copy
import inspect
import io
import sys
import unittest
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from lightning_shard.backends.in_process.faults import RankDropped
from lightning_shard.errors import (
    CollectiveMismatchError,
    ConfigError,
    DeadlockError,
    RankFailedError,
)
from lightning_shard.testing.ranks import Fault, make_world, run_ranks

_FOLLOWING_ERRORS = (RankFailedError, DeadlockError, CollectiveMismatchError)
_CAPTURING_FIXTURES = {"capsys", "capsysbinary", "capfd", "capfdbinary", "capteesys"}
Streams = tuple[io.StringIO, io.StringIO]
_OUR_MODULES = ("lightning_shard.testing.pytest_plugin", "_lightning_shard_pytest")
_MADE_PER_RANK = object()


@dataclass(frozen=True)
class RankCall:
    """The call of a test on one rank.

    fixture that needs `rank`, itself or through another   made on every rank, inside the world
    any other of the tests, of function scope              made once; ranks 1 .. N-1 get deep copies
    of wider scope, or of pytest and its plugins           made once and shared

    So a model that a fixture builds is each rank's own, and begins with the same weights on all.
    `_fixtureinfo` is private to pytest; the plugin's tests fail when it changes.
    """

    function: Callable[..., Any]
    values: dict[str, Any]


class RankFixtures:
    """The fixtures of a test: those that each rank makes, and the values of the others."""

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
        """Return each rank's call: rank 0 gets the original values, the others deep copies."""
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


class RankTest:
    """A test, as pytest has collected it, that carries the marker `ranks`."""

    def __init__(self, item: pytest.Item) -> None:
        marker = item.get_closest_marker("ranks")
        assert marker is not None
        self._item = _require_function(item)
        try:
            self._num_ranks, self._seed, self._faults = _arguments(*marker.args, **marker.kwargs)
            make_world(self._num_ranks, self._seed, self._faults)
        except (TypeError, ConfigError) as error:
            raise pytest.UsageError(
                f"{item.nodeid}: {error}\nExpected @pytest.mark.ranks(num_ranks, seed=0, faults=())"
            ) from error
        self._fixtures = RankFixtures(self._item)

    def set_up(self) -> None:
        """Prepare the test for pytest's own setup."""
        self._fixtures.hide()

    def run(self) -> None:
        """Run the test on every rank, and raise a rank's error: a failure rather than a skip."""
        calls, raised = self._fixtures.calls(self._num_ranks), dict[int, BaseException]()
        failure: BaseException | None = None
        with self._captured() as streams:

            def run_rank(rank: int) -> None:
                if streams is not None:
                    sys.stdout, sys.stderr = streams[rank]
                try:
                    self._run_rank(rank, calls[rank])
                except RankDropped:
                    raise
                except BaseException as error:
                    raised[rank] = error
                    raise

            try:
                run_ranks(run_rank, self._num_ranks, seed=self._seed, faults=self._faults)
            except BaseException as error:
                failure = error
        if failure is not None:  # raised here, so that it is not in the context of another
            raise _choose_error(failure, raised, self._num_ranks)

    def _run_rank(self, rank: int, call: RankCall) -> None:
        with self._fixtures.made(rank, call) as arguments:
            call.function(**arguments)

    @contextmanager
    def _captured(self) -> Iterator[list[Streams] | None]:
        """Give each rank standard streams of its own inside, which the report shows if used."""
        separate = self._item.config.getoption("capture") in ("fd", "sys")
        if not separate or _CAPTURING_FIXTURES & set(self._item.fixturenames):
            yield None
            return
        streams = [(io.StringIO(), io.StringIO()) for _ in range(self._num_ranks)]
        try:
            yield streams
        finally:
            for rank, pair in enumerate(streams):
                for name, stream in zip(("stdout", "stderr"), pair, strict=True):
                    if text := stream.getvalue():
                        self._item.add_report_section("call", f"{name} of rank {rank}", text)


def _arguments(
    num_ranks: int, *, seed: int = 0, faults: Iterable[Fault] = ()
) -> tuple[int, int, tuple[Fault, ...]]:
    return num_ranks, seed, tuple(faults)


def _require_function(item: pytest.Item) -> pytest.Function:
    problem = ""
    if not isinstance(item, pytest.Function):
        problem = f"a {type(item).__name__}"
    elif item.cls is not None and issubclass(item.cls, unittest.TestCase):
        problem = "a method of unittest.TestCase"
    elif inspect.iscoroutinefunction(item.obj) or inspect.isasyncgenfunction(item.obj):
        problem = "an async function"
    if problem:
        raise pytest.UsageError(
            f"{item.nodeid}: the marker 'ranks' was given to {problem}, expected a plain test "
            "function or method."
        )
    assert isinstance(item, pytest.Function)
    return item


def _choose_error(
    first: BaseException, raised: dict[int, BaseException], num_ranks: int
) -> BaseException:
    """Return the error that the report shows, with notes that name the other failed ranks."""
    own = {
        rank: error
        for rank, error in raised.items()
        if not isinstance(error, (*_FOLLOWING_ERRORS, pytest.skip.Exception))
    }
    chosen = first
    if isinstance(first, pytest.skip.Exception):
        if not own:
            first.__notes__ = []  # a reason to skip is one line
            return first
        rank, chosen = min(own.items())
        chosen.add_note(f"This was raised on rank {rank} of {num_ranks}.")
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, error in own.items():
        if error is not chosen:
            alike[_summary(error)].append(rank)
    for text, ranks in alike.items():
        chosen.add_note(f"Rank {', '.join(map(str, sorted(ranks)))} failed too: {text}")
    return chosen


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
