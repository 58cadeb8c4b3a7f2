"""The benchmark of elastic training: its arithmetic, and small jobs."""

import pytest

from tests.benchmarks.elastic import measure_kills, measure_snapshots, parts_of, step_seconds
from tests.benchmarks.elastic_processes import Options, Step

TINY = Options(num_ranks=2, width=16, batch_size=1, snapshot_every=4)


def step(time: float, number: int, **changes: object) -> Step:
    values = {"pid": 1, "rank": 0, "size": 2, "generation": 1, "marks": {}, **changes}
    return Step(time=time, step=number, **values)  # type: ignore[arg-type]


def test_parts_are_the_times_between_the_marks() -> None:
    marks = {"detection": 10.5, "agreement on members": 10.75, "snapshot": 11.0}
    assert parts_of(step(11.5, 3, marks=marks), 10.0) == {
        "detection": 0.5,
        "agreement on members": 0.25,
        "snapshot": 0.25,
        "step": 0.5,
    }
    assert parts_of(step(11.5, 3, marks={"snapshot": 11.0}), 10.0) == {}


def test_what_lies_between_generations_is_no_step() -> None:
    steps = [step(0.0, 1), step(1.0, 2), step(9.0, 2, generation=2), step(10.0, 3, generation=2)]
    assert step_seconds(steps) == 1.0


@pytest.mark.slow
@pytest.mark.benchmark
@pytest.mark.timeout(240)
@pytest.mark.parametrize("restarts", [False, True])
def test_a_killed_rank_is_recovered_from(restarts: bool) -> None:
    (recovery,) = measure_kills(TINY, 1, restarts=restarts)
    assert recovery.seconds > 0
    assert 0 <= recovery.steps_lost <= TINY.snapshot_every
    if not restarts:
        assert sum(recovery.parts.values()) == pytest.approx(recovery.seconds)


@pytest.mark.slow
@pytest.mark.benchmark
@pytest.mark.timeout(240)
def test_a_round_of_turns_is_timed_and_weighed() -> None:
    costs = measure_snapshots(TINY, 1)
    assert costs.keys() == {"zero2", "never", "every 10", "every 1"}
    assert all(len(one.record.step_seconds) == 1 for one in costs.values())
    assert all(one.held_bytes > 0 for one in costs.values())
    assert costs["zero2"].snapshot_bytes == 0
    assert costs["every 1"].snapshot_bytes > 0
