"""Each planted mistake is found, and named by step, tensor and cause."""

import pytest

from lightning_shard import prove
from lightning_shard.proving.verdict import Verdict
from tests.proving.planted import PLANTED, Planted, TiedByMemory


def _prove(planted: Planted) -> Verdict:
    return prove(
        planted.module(),
        planted.data(),
        strategy=planted.strategy,
        trainer_options=planted.options,
    )


@pytest.mark.few_cases(10)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_named(name: str) -> None:
    planted = PLANTED[name]
    verdict = _prove(planted)
    assert verdict.outcome == "different", str(verdict)
    assert verdict.first is not None
    assert verdict.cause is not None
    place = verdict.first.place
    got = (place.step, place.kind, place.name, verdict.cause.name)
    expected = (planted.step, planted.kind, planted.name, planted.cause)
    assert got == expected, str(verdict)
    if planted.rank is not None:
        assert verdict.first.rank == planted.rank


def test_memory_that_two_parameters_share_is_refused_and_told() -> None:
    verdict = _prove(
        Planted(module=TiedByMemory, kind="weight", name="embedding.weight", cause="shared memory")
    )
    assert verdict.outcome == "refused"
    assert "share memory" in str(verdict)
