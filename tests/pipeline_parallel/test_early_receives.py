"""Receives posted early: literal tables, and what has to stay in order."""

import pytest

from lightning_shard.backends.registry import backend_names, get_backend
from lightning_shard.pipeline_parallel.early_receives import with_early_receives
from lightning_shard.pipeline_parallel.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    forward_schedule,
    make_schedule,
)


def _rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.actions]


def _without_receives(row: tuple[Action, ...]) -> list[Action]:
    return [action for action in row if not action.kind.startswith("RECV")]


def _receives(row: tuple[Action, ...]) -> list[Action]:
    return [action for action in row if action.kind.startswith("RECV")]


def test_literal_table_of_1f1b() -> None:
    early = with_early_receives(make_schedule("1f1b", num_ranks=2, num_microbatches=3))

    assert _rows(early) == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0F2 0SEND_F2 0RECV_B2 0B1 0B2",
        "1RECV_F0 1RECV_F1 1F0 1RECV_F2 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


def test_literal_table_of_a_forward_pass() -> None:
    early = with_early_receives(forward_schedule([0, 1], 4))

    assert _rows(early) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3",
        "1RECV_F0 1RECV_F1 1RECV_F2 1RECV_F3 1F0 1F1 1F2 1F3",
    ]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rest_stays_in_order_and_gradients_follow_their_activations(
    name: str, num_ranks: int
) -> None:
    published = make_schedule(name, num_ranks=num_ranks, num_microbatches=4 * num_ranks)
    early = with_early_receives(published)

    for row, before in zip(early.actions, published.actions, strict=True):
        assert _without_receives(row) == _without_receives(before)
        assert _receives(row) == _receives(before)
        for receive in _receives(row):
            if receive.kind == "RECV_B":
                sent = receive._replace(kind="SEND_F")
                assert row.index(sent) < row.index(receive)
    assert early.actions != published.actions


def test_only_nccl_pairs_messages_by_their_order() -> None:
    ordered = {name for name in backend_names() if not get_backend(name).matches_tags}

    assert ordered == {"nccl"}
