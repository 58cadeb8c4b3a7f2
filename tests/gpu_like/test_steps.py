"""Steps without elements: no error, mixture of devices, race, wait without a reason."""

import json
from functools import cache
from typing import Any

import pytest

from tests.gpu_like.__main__ import every_fit
from tests.gpu_like.fits import COUNTED
from tests.gpu_like.reasons import REASONS, reason_for, unexplained
from tests.processes import run_alone

QUICK = ("zero3/bf16-mixed/0",)


def may_wait(name: str) -> bool:
    """Whether a fit is one of those that have waits, each with its reason."""
    strategy, precision, _ = name.split("/")
    return precision == "16-mixed" or any(
        part in strategy for part in ("unused", "offload", "async", "pipeline", "hybrid")
    )


@cache
def seen_of(names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Run fits in one process of their own; return what was seen of each."""
    seconds = 30 + 60 * len(names)
    run = run_alone("-m", "tests.gpu_like", "--json", *names, timeout_seconds=seconds)
    assert run.returncode == 0, run.output
    return dict(json.loads(line) for line in run.output.splitlines() if line.startswith('["'))


def check(name: str, seen: dict[str, Any]) -> None:
    assert seen["error"] == ""
    assert seen["num_steps"] == len(COUNTED)
    assert seen["num_operations"] > 1000 * len(COUNTED)  # or not all of it was watched
    assert seen["races"] == []
    assert seen["num_uses"] > 1000 * len(COUNTED)
    assert unexplained(map(tuple, seen["waits"]), seen["num_steps"]) == []
    if not may_wait(name):
        assert seen["waits"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_step_waits_for_nothing(name: str) -> None:
    assert not may_wait(name)
    check(name, seen_of(QUICK)[name])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [one for one in every_fit() if one not in QUICK])
def test_a_step_waits_for_nothing_without_a_reason(name: str) -> None:
    check(name, seen_of((name,))[name])


@pytest.mark.slow
def test_each_reason_is_of_a_wait_that_there_is() -> None:
    names = (
        "shard_ddp/16-mixed/0",
        "zero2_offload/16-mixed/0",
        "zero2_unused/32-true/0",
        "async_sgd/32-true/0",
        "pipeline_parallel/32-true/0",
    )
    waits = [one for seen in seen_of(names).values() for one in seen["waits"]]
    assert {reason_for(tuple(one)) for one in waits} == set(REASONS)
