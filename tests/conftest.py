"""What holds for every test: one thread, an environment of its own, no group skipped as a whole."""

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

_ran: Counter[str] = Counter()
_skipped: Counter[str] = Counter()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Compute on one thread: with models this small several only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Put `os.environ` back: launchers leave WORLD_SIZE there, and processes inherit it."""
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    group = report.nodeid.split("::")[0]
    if report.skipped:
        _skipped[group] += 1
    elif report.when == "call":
        _ran[group] += 1


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail when a file's tests were all skipped: that hides what they were written for."""
    hidden = sorted(group for group in _skipped if not _ran[group])
    if hidden and exitstatus == pytest.ExitCode.OK:
        print(f"\nevery test was skipped in {', '.join(hidden)}: deselect them by marker instead")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
