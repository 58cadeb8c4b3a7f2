"""Mistakes that are planted into the package are found by programs, and shrunk."""

import itertools

import pytest

from tests.fuzz.campaign import schemes_for
from tests.fuzz.features import drawn, tags_of
from tests.fuzz.planted import MISTAKES
from tests.fuzz.run import DEFECT, EQUAL, Outcome, judged
from tests.fuzz.shrink import shrunk
from tests.fuzz.workers import Task, Worker, outcomes, workers

MOST_PROGRAMS = 40
MOST_FEATURES = 4
# What a program must have for a mistake to show; others are not run, nor counted.
TAKES = {"states_are_not_resumed": frozenset({"resumed"})}
SCHEMES = ("zero1 x2", "zero2 x2", "zero3 x4", "shard_ddp x2")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found_and_shrunk(mistake: str) -> None:
    with workers(1, mistake) as pool:
        task, outcome = _first_defect(pool[0], TAKES.get(mistake, frozenset()))

        def judge(features: tuple[str, ...]) -> Outcome:
            return _judged(pool[0], Task(features, task.seed, task.scheme))

        fewest, _ = shrunk(task.features, outcome, judge)
    assert judged(fewest, task.seed, task.scheme).verdict == EQUAL  # without the mistake
    assert len(fewest) <= MOST_FEATURES, fewest


def _judged(worker: Worker, task: Task) -> Outcome:
    return next(outcomes([worker], [task]))[1]


def _first_defect(worker: Worker, takes: frozenset[str]) -> tuple[Task, Outcome]:
    fit = (seed for seed in itertools.count() if takes <= tags_of(drawn(seed)))
    for seed in itertools.islice(fit, MOST_PROGRAMS):
        features = tuple(drawn(seed))
        possible = schemes_for(features, seed, 0)
        for scheme in SCHEMES:
            if scheme in possible:
                task = Task(features, seed, scheme)
                outcome = _judged(worker, task)
                if outcome.verdict == DEFECT:
                    return task, outcome
    pytest.fail(f"not found in {MOST_PROGRAMS} programs")
