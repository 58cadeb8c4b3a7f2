"""On processes that read shared memory in place, every stage trains as a single device does."""

from typing import Any
from unittest.mock import patch

import pytest

from lightning_shard.backends.shm import backend as shm_backend
from tests.processes import rank_and_world_size, run_processes
from tests.strategies.parity import (
    STRATEGIES,
    Case,
    Run,
    assert_bitwise_equal,
    assert_parity,
    ignoring,
    single_device,
    train_cases,
)

pytestmark = ignoring()

QUICK = [Case(model="gpt", strategy=strategy, num_ranks=2) for strategy in STRATEGIES]
ON_THREE = [
    Case(model="gpt", strategy="zero3", num_ranks=3),
    Case(model="mixture", strategy="zero2", num_ranks=3),
    Case(model="sync_conv", strategy="zero1", num_ranks=3),
]
IN_BF16 = [Case(model="lstm", strategy="zero3", num_ranks=3, precision="bf16-mixed")]
SLOW = pytest.mark.slow
Runs = list[tuple[Case, list[Run]]]


@pytest.fixture(
    scope="module",
    params=[QUICK, *(pytest.param(one, marks=SLOW) for one in (ON_THREE, IN_BF16))],
    ids=["every stage", "three ranks", "bf16-mixed"],
)
def runs(request: pytest.FixtureRequest) -> Runs:
    """What each rank makes of each case, one after the other in the same processes."""
    cases: list[Case] = request.param
    of_ranks = run_processes(train_cases, cases[0].num_ranks, cases=cases, backend="shm")
    return list(zip(cases, map(list, zip(*of_ranks, strict=True)), strict=True))


def test_equals_a_single_device(runs: Runs) -> None:
    for case, of_ranks in runs:
        tolerance = {"rtol": 2e-2, "atol": 2e-3} if case.precision == "bf16-mixed" else {}
        assert_parity(of_ranks[0], single_device(case), **tolerance)


def test_the_ranks_end_with_the_same_bits(runs: Runs) -> None:
    for _, (first, *others) in runs:
        for other in others:
            assert_bitwise_equal(other, first)


def train_on_hosts(hosts: str, **arguments: Any) -> list[Run]:
    """Train where each rank pretends to be on the host of its letter."""
    own = hosts[rank_and_world_size()[0]]
    with patch.object(shm_backend, "own_host", lambda: own):
        return train_cases(**arguments)


@pytest.mark.parametrize(
    ("hosts", "strategies"),
    [
        ("AABB", ["zero2"]),
        pytest.param("AABB", STRATEGIES, marks=SLOW),
        pytest.param("ABAB", STRATEGIES, marks=SLOW),
        pytest.param("AAB", STRATEGIES, marks=SLOW),
    ],
)
def test_ranks_of_several_hosts_train_as_a_single_device(hosts: str, strategies: list[str]) -> None:
    cases = [Case(model="gpt", strategy=one, num_ranks=len(hosts)) for one in strategies]
    of_ranks = run_processes(train_on_hosts, len(hosts), hosts=hosts, cases=cases, backend="shm")
    for case, runs in zip(cases, zip(*of_ranks, strict=True), strict=True):
        assert_parity(runs[0], single_device(case))
        for other in runs[1:]:
            assert_bitwise_equal(other, runs[0])
