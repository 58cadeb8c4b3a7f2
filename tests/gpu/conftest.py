"""Tests that need more GPUs than there are do not run, and are named at the end."""

from typing import Any

import pytest

from tests.gpu.machine import too_few

_not_run: list[tuple[str, str]] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that are marked `gpus(n)` where there are fewer."""
    left, dropped = [], []
    for item in items:
        marker = item.get_closest_marker("gpus")
        reason = too_few(*marker.args) if marker else None
        (dropped if reason else left).append(item)
        if reason and config.getoption("-m") == "gpu":
            _not_run.append((item.nodeid, reason))
    if dropped:
        items[:] = left
        config.hook.pytest_deselected(items=dropped)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name what could not run."""
    for name, reason in _not_run:
        terminalreporter.write_line(f"NOT RUN {name}: {reason}")
