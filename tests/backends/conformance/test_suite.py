"""The suite tells the truth about checks that fail, alone or together, and about ranks that die."""

import os
import tempfile
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_shard.backends.base import GlooBackend
from lightning_shard.backends.collectives import Collectives
from tests.backends.conformance.limits import LIMITS
from tests.backends.conformance.suite import CHECKS, Limit, Outcome, read_outcome, run_all
from tests.backends.conformance.worlds import WORLDS
from tests.processes import rank_and_world_size, run_processes

CPU = torch.device("cpu")
LIMIT = Limit(error="RuntimeError", match="no such type")


def test_every_limit_belongs_to_a_check() -> None:
    backends = {world.backend for world in WORLDS}
    assert all(backend in backends and check in CHECKS for backend, check in LIMITS)


@pytest.mark.parametrize(
    ("outcome", "complaint"),
    [
        (Outcome(error="RuntimeError", message="there is no such type"), ""),
        (Outcome(), "strike it from LIMITS"),
        (Outcome(error="ValueError", message="no such type", report="traceback"), "traceback"),
        (Outcome(error="RuntimeError", message="closed", report="traceback"), "traceback"),
    ],
)
def test_a_limit_is_that_error_and_no_other(outcome: Outcome, complaint: str) -> None:
    assert complaint in LIMIT.complaint(outcome)
    assert bool(LIMIT.complaint(outcome)) == bool(complaint)


def run_bad_checks(folder: str) -> None:
    def fails_on_rank_1(collectives: Collectives) -> None:
        assert collectives.rank == 0

    def fails_everywhere(collectives: Collectives) -> None:
        raise ValueError("everywhere")

    def loses_rank_1(collectives: Collectives) -> None:
        if collectives.rank == 1:
            os._exit(0)
        collectives.barrier()

    bad = {"one": fails_on_rank_1, "all": fails_everywhere, "lost": loses_rank_1}
    CHECKS.update(bad)
    rank, size = rank_and_world_size()
    GlooBackend().init_process_group(
        rank=rank, world_size=size, device=CPU, timeout=timedelta(seconds=20)
    )
    assert dist.group.WORLD is not None
    names = ["one", "all", "all_gather_object", "lost", "send_object_list"]
    run_all(Collectives(dist.group.WORLD), CPU, names, folder, patience_seconds=3)


@pytest.mark.slow
def test_a_failed_check_spoils_no_other_and_a_lost_rank_ends_the_run() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_processes(run_bad_checks, 2, vanishing_ranks={1}, folder=folder)
        errors = {
            name: [outcome and outcome.error for outcome in outcomes]
            for name in ("one", "all", "all_gather_object", "lost", "send_object_list")
            if (outcomes := [read_outcome(folder, name, rank) for rank in range(2)])
        }
    assert errors == {
        "one": ["", "AssertionError"],
        "all": ["ValueError", "ValueError"],
        "all_gather_object": ["", ""],
        "lost": ["RankFailedError", None],
        "send_object_list": [None, None],
    }
