"""Turns of fragments, as literal tables, and what holds for every schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.data_parallel.local_sgd.rules import SyncSchedule

# fragments that begin after steps 1, 2, ...
TABLES = [
    (SyncSchedule(sync_every=3), [[], [], [0], [], [], [0]]),
    (SyncSchedule(sync_every=1), [[0], [0], [0]]),
    (SyncSchedule(sync_every=6, fragments=2), [[], [], [0], [], [], [1], [], [], [0]]),
    (SyncSchedule(sync_every=3, fragments=2), [[0], [], [1], [0], [], [1]]),
    (SyncSchedule(sync_every=3, fragments=3), [[0], [1], [2], [0]]),
]


@pytest.mark.parametrize(("schedule", "table"), TABLES)
def test_turns(schedule: SyncSchedule, table: list[list[int]]) -> None:
    assert [schedule.beginning(step) for step in range(1, len(table) + 1)] == table


def test_steps_count_from_the_end_of_the_warm_up() -> None:
    schedule = SyncSchedule(sync_every=4, warmup_steps=3)
    assert [schedule.is_warming_up(step) for step in range(5)] == [True, True, True, False, False]
    assert [step for step in range(4, 16) if schedule.beginning(step)] == [7, 11, 15]
    assert [step for step in range(4, 16) if schedule.ends_round(step)] == [7, 11, 15]


@given(sync_every=st.integers(1, 40), fragments=st.integers(1, 40), start=st.integers(0, 100))
def test_each_fragment_has_one_turn_in_each_round(
    sync_every: int, fragments: int, start: int
) -> None:
    schedule = SyncSchedule(sync_every=sync_every, fragments=min(fragments, sync_every))
    steps = range(start, start + sync_every)
    turns = [fragment for step in steps for fragment in schedule.beginning(step)]
    assert sorted(turns) == list(range(schedule.fragments))
    assert max(len(schedule.beginning(step)) for step in steps) == 1
