"""Which snapshot all ranks go back to, when some are lost."""

from collections.abc import Sequence

import pytest

from lightning_shard.checkpoint.rank_snapshot import Snapshot
from lightning_shard.elastic.recovery import RecoveryPlan, agree
from lightning_shard.testing import run_ranks
from tests.elastic.engines import Setting, run_to, start, survivors
from tests.groups import all_ranks


@pytest.mark.parametrize("lost", [[2], [0, 2], [1, 3]])
def test_ranks_without_common_neighbours_may_be_lost(lost: list[int]) -> None:
    held, _ = run_to(Setting(stage=2), 4, 1)
    plan = agreed(survivors(held, lost, 1))
    assert plan is not None
    assert plan.step == 1
    assert len(plan.holders) == 4


@pytest.mark.parametrize("lost", [[1, 2], [3, 0], [0, 1, 2]])
def test_with_neighbours_everything_is_lost(lost: list[int]) -> None:
    held, _ = run_to(Setting(stage=2), 4, 1)
    assert agreed(survivors(held, lost, 0)) is None


def test_a_host_of_two_may_be_lost_with_buddies_on_the_other() -> None:
    held, _ = run_to(Setting(stage=2), 4, 1, stride=2)
    assert agreed(survivors(held, [0, 1], 0)) is not None
    assert agreed(survivors(held, [0, 2], 0)) is None


def test_all_newcomers_agree_on_nothing() -> None:
    assert agreed([[], []]) is None


def agreed(holdings: Sequence[list[Snapshot]]) -> RecoveryPlan | None:
    def fn(rank: int) -> RecoveryPlan | None:
        collectives = all_ranks()
        return agree(collectives, holdings[rank])

    plans = run_ranks(fn, len(holdings))
    assert all(plan == plans[0] for plan in plans)
    return plans[0]


def snapshots(num_ranks: int, step: int, generation: int = 0) -> list[Snapshot]:
    def fn(_: int) -> Snapshot:
        return start(Setting(stage=1)).snapshot(step, generation=generation)

    return [one for one in run_ranks(fn, num_ranks) if one is not None]


def test_the_newest_step_that_is_full_counts() -> None:
    old, new = snapshots(2, 10), snapshots(2, 20)
    plan = agreed([[old[0], new[0]], [old[1], new[1]]])
    assert plan is not None
    assert plan.step == 20
    plan = agreed([[old[0], new[0]], [old[1]]])
    assert plan is not None
    assert (plan.step, plan.holders) == (10, ((0,), (1,)))


def test_a_step_that_was_taken_back_does_not_come_again() -> None:
    taken_back, followed = snapshots(2, 20, generation=1), snapshots(2, 12, generation=2)
    plan = agreed([[taken_back[0], followed[0]], [taken_back[1], followed[1]]])
    assert plan is not None
    assert (plan.generation, plan.step) == (2, 12)


def test_shards_of_two_generations_are_not_mixed() -> None:
    first, second = snapshots(2, 20, generation=1), snapshots(2, 20, generation=2)
    assert agreed([[first[0]], [second[1]]]) is None
