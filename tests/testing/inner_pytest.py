"""pytest runs inside a test, with our plugin and no other."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_shard.testing import rank_test

REPOSITORY = Path(__file__).parents[2]
PLUGIN = "_lightning_shard_pytest"  # as it is installed; of a checkout, whose copy may be old:
if find_spec("lightning_shard.testing.pytest_plugin") is not None:
    PLUGIN = "lightning_shard.testing.pytest_plugin"
HEADER = """
import pytest
import torch.distributed as dist
from torch import nn, ones, tensor
from lightning_shard.testing import Fault

def total(value):
    summed = tensor(float(value))
    dist.all_reduce(summed)
    return summed.item()
"""


@pytest.fixture(autouse=True)
def only_our_plugin(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load no installed plugins, so that it does not matter whether ours is installed."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    assert rank_test.RankTest is not None  # imported already: an inner run must not do it anew


def run(pytester: pytest.Pytester, source: str, *arguments: str) -> pytest.RunResult:
    pytester.makepyfile(HEADER + source)
    filters = ("-W", "default", "-W", "ignore::pytest.PytestAssertRewriteWarning")
    return pytester.runpytest_inprocess("-p", PLUGIN, "--strict-markers", *filters, *arguments)


def run_process(
    pytester: pytest.Pytester, source: str, *arguments: str, stdin: str = ""
) -> list[str]:
    pytester.makepyfile(HEADER + source)
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, *arguments]
    return pytester.run(*command, stdin=stdin.encode()).outlines
