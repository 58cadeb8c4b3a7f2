"""What holds for every test: one thread, and no group may be skipped as a whole."""

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
