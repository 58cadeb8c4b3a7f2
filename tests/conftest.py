"""A group of tests that is skipped as a whole hides what it was written for: it fails the run."""

from collections import Counter

import pytest

_ran: Counter[str] = Counter()
_skipped: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    group = report.nodeid.split("::")[0]
    if report.skipped:
        _skipped[group] += 1
    elif report.when == "call":
        _ran[group] += 1


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    hidden = sorted(group for group in _skipped if not _ran[group])
    if hidden and exitstatus == pytest.ExitCode.OK:
        print(f"\nevery test was skipped in {', '.join(hidden)}: deselect them by marker instead")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
