"""Elastic jobs on real processes, disturbed at random: the training is the undisturbed one."""

import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.chaos import Chaos, Seen
from tests.elastic.chaos_job import NUM_SAMPLES, Job, undisturbed
from tests.elastic.runs import Journal
from tests.strategies.parity import UPSTREAM_WARNINGS

pytestmark = [
    pytest.mark.timeout(600),  # a hang is found by the driver, which then ends what it has started
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]

NUM_EVENTS = 25
NUM_SPARE_FILES = 10  # of another place: rank 0 has a connection with each rank; fewer than events


@cache
def expected(num_ranks: int, max_epochs: int) -> tuple[Journal, float]:
    """The same training on ranks that stay."""
    return undisturbed(Job(folder="", num_ranks=num_ranks, max_epochs=max_epochs))


def assert_same_training(chaos: Chaos) -> None:
    """Every sample counted once per epoch, the same losses, and all have come to the same end."""
    job, seen = chaos.job, chaos.seen
    journal, (undisturbed, last_loss) = seen.journal(), expected(job.num_ranks, job.max_epochs)
    assert journal.samples() == {e: list(range(NUM_SAMPLES)) for e in range(job.max_epochs)}
    assert journal.losses() == pytest.approx(undisturbed.losses(), rel=1e-4)
    assert len(seen.ended) >= 2
    assert [*seen.ended.values()] == pytest.approx([last_loss] * len(seen.ended), rel=0.01)
    assert len({*seen.ended.values()}) == 1


def assert_ended_as_told(chaos: Chaos) -> None:
    """Who was killed was killed, who left has left in order, all others came to the end."""
    ends = {"SIGKILL": -signal.SIGKILL, "SIGTERM": 128 + signal.SIGTERM}
    for process, status in chaos.processes.statuses().items():
        told = chaos.processes.struck.get(process)
        assert status == (0 if told is None else ends[told]), chaos.processes.report()
    assert chaos.processes.living() == []


def assert_nothing_has_piled_up(seen: Seen) -> None:
    """Who has come to the end holds no more threads than at first, nor files for each change."""
    for process in seen.ended:
        steps = seen.steps[process]
        generations = sorted({one["generation"] for one in steps})
        first = [one for one in steps if one["generation"] == generations[0]]
        last = [one for one in steps if one["generation"] >= generations[-2:][0]]
        for what, spare in (("num_threads", 0), ("num_files", NUM_SPARE_FILES)):
            before, after = (max(one[what] for one in first), min(one[what] for one in last))
            assert after <= before + spare, (what, process, steps)


@pytest.mark.slow
def test_rank_0_is_killed_another_joins_and_one_leaves(tmp_path: Path) -> None:
    job = Job(folder=str(tmp_path), num_ranks=3, max_epochs=2)
    chaos = Chaos(job, seed=1, by_launcher=False)
    chaos.run(["first", "add", "leave"])
    assert_same_training(chaos)
    assert_ended_as_told(chaos)
    assert_nothing_has_piled_up(chaos.seen)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (0, {"by_launcher": True}),
        (1, {"by_launcher": False}),
        (2, {"by_launcher": False, "saves_every": 5}),
        (3, {"by_launcher": False, "scheme": "zero3"}),
        (4, {"by_launcher": False, "scheme": "zero1"}),
        (5, {"by_launcher": False, "scheme": "shard_ddp"}),
    ],
)
def test_25_random_events(seed: int, options: dict[str, Any], tmp_path: Path) -> None:
    by_launcher = options.pop("by_launcher")
    job = Job(folder=str(tmp_path), num_ranks=4, max_epochs=40, **options)
    chaos = Chaos(job, seed, by_launcher=by_launcher)
    chaos.run(["any"] * NUM_EVENTS)
    assert len(chaos.events) == NUM_EVENTS
    assert_same_training(chaos)
    assert_ended_as_told(chaos)
    assert_nothing_has_piled_up(chaos.seen)


@pytest.mark.slow
def test_training_goes_on_without_the_server(tmp_path: Path) -> None:
    job = Job(folder=str(tmp_path), num_ranks=3, max_epochs=2)
    chaos = Chaos(job, seed=1, by_launcher=False)
    chaos.run(["server"])
    assert_same_training(chaos)
    assert_ended_as_told(chaos)
    assert "ranks that are lost are not replaced" in chaos.processes.report()


@pytest.mark.slow
def test_a_loss_without_a_server_is_an_error_and_no_hang(tmp_path: Path) -> None:
    job = Job(folder=str(tmp_path), num_ranks=3, max_epochs=2)
    chaos = Chaos(job, seed=1, by_launcher=False)
    chaos.run(["server", "kill"], ends_well=False)
    assert chaos.seen.ended == {}
    assert sorted(chaos.processes.statuses().values()) == [-signal.SIGKILL, 1, 1]
    assert chaos.processes.report().count("no rank can join or be replaced any more") >= 2
    assert chaos.processes.living() == []
