"""Runs one test of pytest on every rank of an in-process world, and reports the ranks' errors."""

import inspect
import io
import sys
import unittest
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from lightning_shard.backends.in_process.faults import RankDropped
from lightning_shard.errors import (
    CollectiveMismatchError,
    ConfigError,
    DeadlockError,
    RankFailedError,
)
from lightning_shard.testing.rank_fixtures import RankCall, RankFixtures
from lightning_shard.testing.ranks import Fault, make_world, run_ranks

_FOLLOWING_ERRORS = (RankFailedError, DeadlockError, CollectiveMismatchError)
_CAPTURING_FIXTURES = {"capsys", "capsysbinary", "capfd", "capfdbinary", "capteesys"}
Streams = tuple[io.StringIO, io.StringIO]


class RankTest:
    """A test that carries the marker `ranks`.

    Args:
        item: The test as pytest has collected it.

    Raises:
        UsageError: The marker's arguments are wrong, or the test cannot run on ranks.
    """

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
        """Run the test on every rank.

        Raises:
            BaseException: The error of a rank; a failure rather than a skip.
        """
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
