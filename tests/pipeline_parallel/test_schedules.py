"""Schedules: the published tables, and what every table has to keep."""

from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_shard.backends.registry import backend_names, get_backend
from lightning_shard.errors import ConfigError
from lightning_shard.pipeline_parallel.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    allowed_microbatches,
    forward_schedule,
    make_schedule,
    with_early_receives,
    with_full_backwards,
)
from tests.pipeline_parallel.published import FIGURES, TABLES, Published, rows_of
from tests.pipeline_parallel.published_rules import RULES, Step

SEVERAL_STAGES = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")
LOOP, V = (0, 1, 2, 3, 0, 1, 2, 3), (0, 1, 2, 3, 3, 2, 1, 0)


@st.composite
def trainings(draw: st.DrawFn) -> Schedule:
    """Any table of a training step that can be made."""
    name = draw(st.sampled_from(SCHEDULES))
    num_ranks, num_microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 17))
    assume(allowed_microbatches(name, num_ranks, num_microbatches))
    per_rank = draw(st.integers(1, 3)) if name in SEVERAL_STAGES else None
    return make_schedule(
        name,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_stages=per_rank and per_rank * num_ranks,
    )


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any table that can be made, training or forward only."""
    schedule = draw(trainings())
    forward_only = draw(st.booleans())
    return forward_schedule(schedule, schedule.num_microbatches) if forward_only else schedule


def message_of(action: Action) -> tuple[int, str, int]:
    """Name a message by the stage that sends it."""
    stage, kind, microbatch = action
    sender = stage + {"RECV_F": -1, "RECV_B": 1}.get(kind, 0)
    return sender, kind[-1], microbatch


def peer_of(schedule: Schedule, action: Action) -> int:
    step = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}[action.kind]
    return schedule.stage_ranks[action.stage + step]


def messages_by_pair(schedule: Schedule, rank: int) -> dict[int, list[tuple[int, str, int]]]:
    """Return for each peer the messages of both directions, in this rank's order."""
    found = defaultdict(list)
    for action in schedule.actions[rank]:
        if not action.computes:
            found[peer_of(schedule, action)].append(message_of(action))
    return found


def run_with_blocking_messages(schedule: Schedule) -> Iterator[Action]:
    """Yield the computations in an order in which each message waits for both of its sides."""
    rows = [list(row) for row in schedule.actions]
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            if not row:
                continue
            if row[0].computes:
                yield row.pop(0)
                progress = True
            elif row[0].kind.startswith("SEND"):
                peer = rows[peer_of(schedule, row[0])]
                if peer and peer[0].kind.startswith("RECV"):
                    same = message_of(peer[0]) == message_of(row[0])
                    if same and peer_of(schedule, peer[0]) == rank:
                        peer.pop(0)
                        row.pop(0)
                        progress = True
    assert not any(rows), f"nobody can go on: {[row[:1] for row in rows]}"


def computed(schedule: Schedule) -> list[list[Step]]:
    return [[tuple(action) for action in row if action.computes] for row in schedule.actions]


def by_rule(name: str, p: int, m: int, v: int) -> list[list[Step]]:
    """Return the published computations; of looped_bfs with the newest backwards first."""
    rows = [RULES[name](rank, p, m, v) for rank in range(p)]
    if name != "looped_bfs":
        return rows
    return [[(s, kind, i if kind == "F" else m - 1 - i) for s, kind, i in row] for row in rows]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: "-".join(map(str, table[:4])))
def test_the_computations_are_in_the_published_order(table: Published) -> None:
    name, p, m, v, _ = table
    made = computed(make_schedule(name, num_ranks=p, num_microbatches=m, num_stages=p * v))
    for rows in (made, by_rule(name, p, m, v)):
        text = [[f"{s}{kind}{i}" if v > 1 else f"{kind}{i}" for s, kind, i in row] for row in rows]
        assert text == table.rows()


@settings(max_examples=150)
@given(trainings())
def test_the_computations_of_any_size_follow_the_published_rules(schedule: Schedule) -> None:
    p, m = schedule.num_ranks, schedule.num_microbatches
    assume(not schedule.name.startswith("interleaved") or m % p == 0)
    assert computed(schedule) == by_rule(schedule.name, p, m, schedule.num_stages // p)


@pytest.mark.parametrize(("name", "num_stages"), [("interleaved_zero_bubble", 4), ("zbv", 8)])
def test_the_computations_are_those_of_the_papers_figures(name: str, num_stages: int) -> None:
    """Figure 8 has the oldest W first, the table the authors' program's; at the same places."""
    schedule = make_schedule(name, num_ranks=4, num_microbatches=8, num_stages=num_stages)
    for row, cells in zip(computed(schedule), rows_of(FIGURES[name]), strict=True):
        weights = iter([i for _, kind, i in row if kind == "I"])
        assert [next(weights) if kind == "W" else i for _, kind, i in row] == [
            int(cell) - 1 for cell in cells
        ]


def test_messages_of_gpipe() -> None:
    schedule = make_schedule("gpipe", num_ranks=3, num_microbatches=2)
    assert [" ".join(map(str, row)) for row in schedule.actions] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0RECV_B0 0B1 0B0",
        "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F1 1SEND_F1 1RECV_B1 1RECV_B0 1B1 1SEND_B1 1B0 1SEND_B0",
        "2RECV_F0 2RECV_F1 2F0 2F1 2B1 2SEND_B1 2B0 2SEND_B0",
    ]


def test_messages_of_1f1b() -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=3)
    assert [" ".join(map(str, row)) for row in schedule.actions] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


def test_the_turn_of_a_v_needs_no_message() -> None:
    schedule = make_schedule("zbv", num_ranks=2, num_microbatches=1)
    assert [" ".join(map(str, row)) for row in schedule.actions] == [
        "0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 3W0 0RECV_B0 0I0 0W0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 2W0 1I0 1SEND_B0 1W0",
    ]


@settings(max_examples=60)
@given(schedules())
def test_each_stage_computes_each_microbatch_once_forward_then_backward(schedule: Schedule) -> None:
    kinds = defaultdict(list)
    for rank, row in enumerate(schedule.actions):
        for action in row:
            assert schedule.stage_ranks[action.stage] == rank
            if action.computes:
                kinds[action.stage, action.microbatch].append(action.kind)
    assert len(kinds) == schedule.num_stages * schedule.num_microbatches
    full, halves = ["F", "B"], ["F", "I", "W"]
    expected = [["F"]] if schedule.name == "forward_only" else [full, halves]
    assert all(order in expected for order in kinds.values())


@settings(max_examples=60)
@given(schedules())
def test_both_ranks_of_a_pair_have_their_messages_in_the_same_order(schedule: Schedule) -> None:
    by_rank = [messages_by_pair(schedule, rank) for rank in range(schedule.num_ranks)]
    for rank, peers in enumerate(by_rank):
        assert rank not in peers
        for peer, messages in peers.items():
            assert by_rank[peer][rank] == messages


@settings(max_examples=60)
@given(schedules())
def test_nobody_waits_for_ever_and_every_input_is_there(schedule: Schedule) -> None:
    """Even where a send blocks until it is received, and a receive until it is sent."""
    done: set[tuple[int, str, int]] = set()
    for stage, kind, microbatch in run_with_blocking_messages(schedule):
        if kind == "F":
            assert stage == 0 or (stage - 1, "F", microbatch) in done
        elif kind != "W":
            is_last = stage == schedule.num_stages - 1
            assert is_last or (stage + 1, "B", microbatch) in done
        done.add((stage, "B" if kind == "I" else kind, microbatch))


@settings(max_examples=60)
@given(schedules())
def test_what_crosses_ranks_is_received_before_it_is_used(schedule: Schedule) -> None:
    for row in schedule.actions:
        here: set[tuple[int, str, int]] = set()
        for action in row:
            stage, kind, microbatch = action
            if kind.startswith("RECV"):
                here.add((stage, kind[-1], microbatch))
            elif kind in ("F", "B", "I"):
                direction = "F" if kind == "F" else "B"
                source = stage + (-1 if kind == "F" else 1)
                if 0 <= source < schedule.num_stages:
                    same_rank = schedule.stage_ranks[source] == schedule.stage_ranks[stage]
                    assert same_rank or (stage, direction, microbatch) in here


def test_full_backwards_stand_where_their_first_halves_stood() -> None:
    halves = make_schedule("zbv", num_ranks=2, num_microbatches=4)
    joined = with_full_backwards(halves)
    for before, after in zip(halves.actions, joined.actions, strict=True):
        expected = [str(one).replace("I", "B") for one in before if one.kind != "W"]
        assert list(map(str, after)) == expected
        assert {one.kind for one in after if one.computes} == {"F", "B"}


@pytest.mark.parametrize(
    ("name", "stage_ranks"),
    [
        ("gpipe", (0, 1, 2, 3)),
        ("1f1b", (0, 1, 2, 3)),
        ("interleaved_1f1b", LOOP),
        ("looped_bfs", LOOP),
        ("interleaved_zero_bubble", LOOP),
        ("zbv", V),
        ("dual_pipe_v", V),
    ],
)
def test_stages_lie_in_a_loop_or_a_v(name: str, stage_ranks: tuple[int, ...]) -> None:
    schedule = make_schedule(name, num_ranks=4, num_microbatches=8)
    assert schedule.stage_ranks == stage_ranks
    assert schedule.num_stages == len(stage_ranks)
    assert schedule.stages_of(1) == tuple(s for s, rank in enumerate(stage_ranks) if rank == 1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_rank_exchanges_nothing(name: str) -> None:
    (row,) = make_schedule(name, num_ranks=1, num_microbatches=3).actions
    assert all(action.computes for action in row)
    assert len(row) == 6


def test_a_forward_pass_keeps_the_placement_of_training() -> None:
    training = make_schedule("zbv", num_ranks=2, num_microbatches=4)
    schedule = forward_schedule(training, 2)
    assert schedule.stage_ranks == (0, 1, 1, 0)
    assert [" ".join(str(a) for a in row if a.computes) for row in schedule.actions] == [
        "0F0 0F1 3F0 3F1",
        "1F0 1F1 2F0 2F1",
    ]
    assert forward_schedule(training.stage_ranks, 2) == schedule


@pytest.mark.parametrize(
    ("name", "num_ranks", "num_microbatches", "num_stages", "message"),
    [
        ("pipedream", 2, 4, None, r"'pipedream'; expected one of gpipe, 1f1b, .*, dual_pipe_v"),
        ("gpipe", 0, 4, None, "over 0 ranks; expected at least 1"),
        ("gpipe", 2, 0, None, "num_microbatches is 0 .* Set num_microbatches to 1,"),
        ("1f1b", 4, 8, 8, "8 stages over 4 ranks .*; expected 1 per rank. Set the stages to 4,"),
        ("zbv", 4, 8, 4, "4 stages over 4 ranks .*; expected 2 per rank. Set the stages to 8,"),
        ("looped_bfs", 4, 8, 6, "6 stages over 4 ranks .* Set the stages to 4 or 8"),
        ("looped_bfs", 4, 8, 3, r"3 stages over 4 ranks .* Set the stages to 4\."),
        ("looped_bfs", 4, 8, 0, r"0 stages over 4 ranks .* Set the stages to 4\."),
        ("interleaved_1f1b", 4, 13, None, "is 13 .* rounds of at least 4 .* to 12 or 15,"),
        ("interleaved_zero_bubble", 4, 9, None, "is 9 .* Set num_microbatches to 8 or 10,"),
        ("dual_pipe_v", 4, 7, None, "is 7 .* one per stage, 8. Set num_microbatches to 8,"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_with_numbers_that_do(
    name: str, num_ranks: int, num_microbatches: int, num_stages: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_schedule(
            name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_stages=num_stages
        )


@given(st.sampled_from(SCHEDULES), st.integers(1, 9), st.integers(-2, 60))
def test_the_numbers_that_an_error_advises_are_allowed(name: str, p: int, m: int) -> None:
    assume(not allowed_microbatches(name, p, m))
    with pytest.raises(ConfigError) as error:
        make_schedule(name, num_ranks=p, num_microbatches=m)
    advice = str(error.value).split("Set num_microbatches to ")[1].split(",")[0]
    assert all(allowed_microbatches(name, p, int(number)) for number in advice.split(" or "))


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
