"""One suite, which every backend passes: each check on each backend and number of ranks."""

import pytest

from tests.backends.conformance import LIMITS
from tests.backends.conformance.worlds import WORLDS, World

CASES = [
    pytest.param(world, check, id=f"{world.name}-{world.size}-{check}", marks=world.marks)
    for world in WORLDS
    for check in world.checks
]


@pytest.mark.few_cases(250)
@pytest.mark.timeout(240)  # the first check of real processes runs all of them
@pytest.mark.parametrize(("world", "check"), CASES)
def test_conformance(world: World, check: str) -> None:
    limit = LIMITS.get((world.backend, check))
    complaints = [
        outcome.report if limit is None else limit.complaint(outcome)
        for outcome in world.outcomes(check)
    ]
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(complaints) if text]
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)
