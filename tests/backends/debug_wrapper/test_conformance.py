"""The conformance suite on a checked Gloo group: the check changes nothing for ranks that agree."""

import tempfile

import pytest
import torch

from tests.backends.conformance import CHECKS, LIMITS
from tests.backends.conformance.suite import Limit, Outcome, read_outcome, run_all
from tests.backends.debug_wrapper.programs import debug_world
from tests.processes import run_processes

# Comparing waits for the peers at once, so ranks must start asynchronous operations of all groups
# in one order; `test_process_group.py` shows what they are told otherwise.
NAMES = [name for name in CHECKS if name != "groups_used_in_another_order_than_made"]
# What differs from a plain Gloo group.
OWN_LIMITS: dict[str, Limit | None] = {
    "a_monitored_barrier": LIMITS.get(("in_process", "a_monitored_barrier")),
    "coalesced_all_reduces": None,
    "coalesced_all_gathers": None,
    "coalesced_reduce_scatters": None,
}


def conform(names: list[str], folder: str) -> None:
    with debug_world("conformance") as collectives:
        run_all(collectives, torch.device("cpu"), names, folder)


def outcomes(size: int) -> dict[str, list[Outcome | None]]:
    with tempfile.TemporaryDirectory() as folder:
        run_processes(conform, size, timeout_seconds=110, names=NAMES, folder=folder)
        return {name: [read_outcome(folder, name, rank) for rank in range(size)] for name in NAMES}


@pytest.fixture(
    scope="module", params=[pytest.param(size, marks=pytest.mark.slow) for size in (2, 3)]
)
def results(request: pytest.FixtureRequest) -> dict[str, list[Outcome | None]]:
    """How each check ended on each rank."""
    return outcomes(request.param)


@pytest.mark.parametrize("name", NAMES)
def test_conformance(name: str, results: dict[str, list[Outcome | None]]) -> None:
    limit = OWN_LIMITS[name] if name in OWN_LIMITS else LIMITS.get(("gloo", name))
    for rank, one in enumerate(results[name]):
        assert one is not None, f"not run on rank {rank}"
        complaint = one.report if limit is None else limit.complaint(one)
        assert not complaint, f"rank {rank}: {complaint}"
