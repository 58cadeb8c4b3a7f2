"""A rank's snapshot back into an engine of the same shards."""

from typing import Any

import pytest
from torch import Tensor

from lightning_shard.checkpoint.rank_snapshot import Snapshot, load, take
from lightning_shard.errors import CheckpointError
from lightning_shard.testing import run_ranks
from tests.elastic.engines import Setting, assert_same, start

Full = tuple[dict[str, Tensor], dict[str, Any]]


def taken(stage: int) -> tuple[list[Snapshot], Full]:
    """Train two ranks for three steps, take their snapshots, and train on for two."""

    def fn(index: int) -> tuple[Snapshot, Full]:
        rank = start(Setting(stage=stage), seed=0)
        rank.train(0, 3)
        snapshot = take(rank.engine, [rank.optimizer], step=3)
        rank.train(3, 5)
        return snapshot, rank.full()

    results = [one for one in run_ranks(fn, 2) if one is not None]
    return [snapshot for snapshot, _ in results], results[0][1]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_goes_on_from_its_own_snapshot(stage: int) -> None:
    snapshots, expected = taken(stage)

    def fn(index: int) -> Full:
        rank = start(Setting(stage=stage), seed=7)
        rank.train(0, 1)
        load(snapshots[index], rank.engine, [rank.optimizer])
        rank.train(3, 5)
        return rank.full()

    result = run_ranks(fn, 2)[0]
    assert result is not None
    assert_same(result, expected)


def test_another_ranks_snapshot_is_refused() -> None:
    snapshots, _ = taken(3)

    def fn(index: int) -> None:
        rank = start(Setting(stage=3), seed=0)
        with pytest.raises(CheckpointError, match=rf"is shard {1 - index} of 2 .*expected shard"):
            load(snapshots[1 - index], rank.engine, [rank.optimizer])

    run_ranks(fn, 2)


def test_a_snapshot_of_another_number_of_ranks_is_refused() -> None:
    snapshots, _ = taken(3)

    def fn(index: int) -> None:
        rank = start(Setting(stage=3), seed=0)
        with pytest.raises(CheckpointError, match=r"is shard 0 of 2 .*expected shard \d of 3"):
            load(snapshots[0], rank.engine, [rank.optimizer])

    run_ranks(fn, 3)
