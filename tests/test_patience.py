"""Tests wait longer where the machine is busy, and no longer where it is not."""

import os

import pytest
from hypothesis import settings

from tests.patience import patient


@pytest.mark.parametrize(("load", "seconds"), [(0.0, 10.0), (2.0, 10.0), (8.0, 40.0)])
def test_what_shares_the_cores_takes_longer(
    load: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert patient(10.0) == seconds


@pytest.mark.timeout(50)
def test_a_busy_machine_ended_tests_that_only_waited_for_their_turn(
    request: pytest.FixtureRequest,
) -> None:
    """The time-out of a test, of starting processes, and of an example of a property."""
    first, second = request.node.iter_markers("timeout")
    assert first.args[0] >= 50
    assert second.args == (50,)
    assert settings.default is not None
    assert settings.default.deadline is None
