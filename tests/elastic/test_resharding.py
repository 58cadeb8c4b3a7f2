"""Who sends what when a flat range is cut anew."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.elastic.recovery import Move, plan_moves
from lightning_shard.errors import LayoutError


def cut(numel: int, num_shards: int) -> dict[int, tuple[int, int]]:
    size = -(-numel // num_shards)
    return {
        shard: (min(shard * size, numel), min((shard + 1) * size, numel))
        for shard in range(num_shards)
    }


def rows(moves: list[Move]) -> list[tuple[int, int, int, int, int]]:
    return [(move.source, move.target, move.shard, move.start, move.stop) for move in moves]


def test_three_ranks_become_two() -> None:
    # Rank 2 of three is lost; its buddy, now rank 0, has shard 2.
    moves = plan_moves({0: [0], 1: [1], 2: [0]}, cut(12, 3), [(0, 6), (6, 12)])
    assert rows(moves) == [(0, 0, 0, 0, 4), (1, 0, 1, 4, 6), (1, 1, 1, 6, 8), (0, 1, 2, 8, 12)]


def test_two_ranks_become_three() -> None:
    moves = plan_moves({0: [0, 1], 1: [1, 0]}, cut(12, 2), [(0, 4), (4, 8), (8, 12)])
    assert rows(moves) == [(0, 0, 0, 0, 4), (1, 1, 0, 4, 6), (1, 1, 1, 6, 8), (0, 2, 1, 8, 12)]


def test_replicas_share_out_what_a_newcomer_needs() -> None:
    moves = plan_moves({0: [0, 1, 2]}, {0: (0, 12)}, [(0, 12)] * 4, min_part_numel=4)
    assert rows(moves)[3:] == [(0, 3, 0, 0, 4), (1, 3, 0, 4, 8), (2, 3, 0, 8, 12)]


def test_small_ranges_are_not_divided() -> None:
    moves = plan_moves({0: [0, 1]}, {0: (0, 12)}, [(0, 12)] * 4, min_part_numel=7)
    assert rows(moves)[2:] == [(0, 2, 0, 0, 12), (1, 3, 0, 0, 12)]


def test_a_shard_that_nobody_holds() -> None:
    with pytest.raises(LayoutError, match="elements 6 to 8 of shard 1, which no rank holds"):
        plan_moves({0: [0]}, cut(12, 2), [(0, 4), (4, 8), (8, 12)])


def test_padding_goes_nowhere() -> None:
    assert rows(plan_moves({0: [0]}, {0: (0, 5)}, [(0, 4), (4, 8)])) == [
        (0, 0, 0, 0, 4),
        (0, 1, 0, 4, 5),
    ]


@st.composite
def changes(
    draw: st.DrawFn,
) -> tuple[dict[int, list[int]], dict[int, tuple[int, int]], list[tuple[int, int]]]:
    numel = draw(st.integers(1, 60))
    old, new = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    ranks = st.lists(st.integers(0, new - 1), min_size=1, max_size=new, unique=True)
    holders = {shard: sorted(draw(ranks)) for shard in range(old)}
    return holders, cut(numel, old), list(cut(numel, new).values())


@given(changes(), st.integers(1, 8))
def test_each_rank_gets_each_element_once_and_its_own_from_itself(
    change: tuple[dict[int, list[int]], dict[int, tuple[int, int]], list[tuple[int, int]]],
    min_part_numel: int,
) -> None:
    holders, old, new = change
    moves = plan_moves(holders, old, new, min_part_numel=min_part_numel)
    for target, (first, last) in enumerate(new):
        got = [e for m in moves if m.target == target for e in range(m.start, m.stop)]
        assert got == list(range(first, last))
    for move in moves:
        assert move.source in holders[move.shard]
        assert old[move.shard][0] <= move.start < move.stop <= old[move.shard][1]
        assert move.source == move.target or move.target not in holders[move.shard]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 60))
def test_holders_of_everything_share_the_load(num_old: int, num_new: int, numel: int) -> None:
    holders = {0: list(range(num_old))}
    bounds = [(0, numel)] * (num_old + num_new)
    sent = [0] * num_old
    for move in plan_moves(holders, {0: (0, numel)}, bounds, min_part_numel=1):
        if move.source != move.target:
            sent[move.source] += move.numel
    assert max(sent) - min(sent) <= -(-numel // num_old)
