"""What follows from a pipeline's options, on any number of ranks."""

from typing import Any

import pytest

from lightning_shard.strategies.dimensions.pipeline import StageOptions


def options(**given: Any) -> StageOptions:
    return StageOptions(**given)


@pytest.mark.parametrize(
    ("given", "num_stages", "stage_ranks"),
    [
        ({}, 2, (0, 1)),
        ({"schedule": "interleaved_1f1b"}, 4, (0, 1, 0, 1)),
        ({"schedule": "zbv"}, 4, (0, 1, 1, 0)),
        ({"schedule": "looped_bfs", "split": [1, 2, 5]}, 4, (0, 1, 0, 1)),
    ],
)
def test_stages_follow_from_the_schedule_or_the_split(
    given: dict[str, object], num_stages: int, stage_ranks: tuple[int, ...]
) -> None:
    chosen = options(**given)
    assert chosen.num_stages(2) == num_stages
    assert chosen.stage_ranks(2) == stage_ranks
    assert chosen.table(2, 4).num_stages == num_stages


def test_a_batch_has_twice_as_many_parts_as_ranks_unless_said() -> None:
    assert [options().num_parts(size) for size in (2, 4)] == [4, 8]
    assert options(num_microbatches=3).num_parts(4) == 3


def test_only_stages_by_cost_are_measured() -> None:
    assert options(split="flops").measured == "flops"
    assert options(split="memory").measured == "memory"
    assert options(split="parameters").measured is options(split=[2]).measured is None
