"""The replay, and what the papers say of idle shares and live activations."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_shard.errors import ConfigError, DeadlockError
from lightning_shard.pipeline_parallel.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    allowed_microbatches,
    forward_schedule,
    make_schedule,
)
from lightning_shard.pipeline_parallel.simulation import Durations, replay, theoretical_idle_share
from lightning_shard.pipeline_parallel.timeline import Timeline, draw_text
from tests.pipeline_parallel.peaks import theoretical_peak_activations

SEVERAL_STAGES = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")


def replayed(name: str, num_ranks: int, num_microbatches: int, **durations: float) -> Timeline:
    schedule = make_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return replay(schedule, Durations(**durations))


def picture(timeline: Timeline) -> list[str]:
    """Draw two columns for each unit of time."""
    return draw_text(timeline, width=2 * round(timeline.duration)).splitlines()


def test_gpipe_in_time() -> None:
    assert picture(replayed("gpipe", 3, 3)) == [
        "rank 0   F0F1F2............B2--B1--B0--  40% idle",
        "rank 1   ..F0F1F2......B2--B1--B0--....  40% idle",
        "rank 2   ....F0F1F2B2--B1--B0--........  40% idle",
    ]


def test_1f1b_in_time() -> None:
    assert picture(replayed("1f1b", 3, 4)) == [
        "rank 0   F0F1F2........B0--F3B1--..B2--..B3--  33% idle",
        "rank 1   ..F0F1....B0--F2B1--F3B2--..B3--....  33% idle",
        "rank 2   ....F0B0--F1B1--F2B2--F3B3--........  33% idle",
    ]


def test_zero_bubble_fills_the_wait_with_the_weights() -> None:
    schedule = make_schedule(
        "interleaved_zero_bubble", num_ranks=3, num_microbatches=4, num_stages=3
    )
    assert picture(replay(schedule)) == [
        "rank 0   F0F1F2....I0W0F3I1W1I2W2I3W3  14% idle",
        "rank 1   ..F0F1..I0F2I1W0F3I2W1I3W2W3  14% idle",
        "rank 2   ....F0I0F1I1F2I2W0F3I3W1W2W3  14% idle",
    ]


def test_a_forward_pass_in_time() -> None:
    assert picture(replay(forward_schedule((0, 1, 2), 3))) == [
        "rank 0   F0F1F2....  40% idle",
        "rank 1   ..F0F1F2..  40% idle",
        "rank 2   ....F0F1F2  40% idle",
    ]


def test_kinds_take_the_time_that_they_are_given() -> None:
    assert picture(replayed("1f1b", 2, 2, forward=2, backward=3)) == [
        "rank 0   F0--F1--......B0----....B1----  33% idle",
        "rank 1   ....F0--B0----F1--B1----......  33% idle",
    ]


def test_computations_take_the_time_that_each_is_given() -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=2)
    durations = replay(schedule).durations | {Action(1, "B", 0): 4.0}
    timeline = replay(schedule, durations)
    assert timeline.durations == durations
    assert picture(timeline) == [
        "rank 0   F0F1........B0--..B1--  45% idle",
        "rank 1   ..F0B0------F1B1--....  27% idle",
    ]


def test_a_message_delays_its_receiver_and_not_its_sender() -> None:
    timeline = replayed("1f1b", 2, 2, message=1)
    assert picture(timeline) == [
        "rank 0   F0F1........B0--..B1--  45% idle",
        "rank 1   ....F0B0--F1B1--......  45% idle",
    ]
    messages = {str(a): (start, end) for a, start, end in timeline.rows[0] if not a.computes}
    assert messages == {
        "0SEND_F0": (1, 2),
        "0SEND_F1": (2, 3),
        "0RECV_B0": (5, 6),
        "0RECV_B1": (8, 9),
    }


def test_messages_that_take_no_time_are_not_in_the_timeline() -> None:
    assert all(event.action.computes for row in replayed("gpipe", 3, 2).rows for event in row)


def test_a_table_without_a_send_is_a_deadlock_that_names_who_waits_for_what() -> None:
    schedule = make_schedule("1f1b", num_ranks=3, num_microbatches=2)
    rows = list(schedule.actions)
    rows[1] = tuple(action for action in rows[1] if str(action) != "1SEND_F1")
    with pytest.raises(DeadlockError, match="rank 0 at 0RECV_B0, rank 1 at 1RECV_B0, rank 2 at 2R"):
        replay(replace(schedule, actions=tuple(rows)))


def test_a_computation_before_its_receive_is_a_deadlock() -> None:
    schedule = Schedule(
        name="by hand",
        num_ranks=2,
        num_microbatches=1,
        stage_ranks=(0, 1),
        actions=(
            (Action(0, "F", 0), Action(0, "SEND_F", 0)),
            (Action(1, "F", 0), Action(1, "RECV_F", 0)),
        ),
    )
    with pytest.raises(DeadlockError, match=r"'by hand' .*: rank 1 at 1F0;"):
        replay(schedule)


@pytest.mark.parametrize(
    ("name", "p", "m", "share"),
    [
        ("gpipe", 4, 8, Fraction(3, 11)),  # (p - 1) / (m + p - 1)
        ("1f1b", 4, 8, Fraction(3, 11)),
        ("interleaved_1f1b", 4, 8, Fraction(3, 19)),  # (p - 1) / (2 m + p - 1)
        ("looped_bfs", 4, 8, Fraction(3, 19)),
        ("interleaved_zero_bubble", 4, 8, Fraction(3, 51)),  # (p - 1) / (6 m + p - 1)
        ("zbv", 4, 8, Fraction(3, 51)),
        ("dual_pipe_v", 4, 8, Fraction(3, 51)),
        ("zbv", 4, 4, Fraction(6, 30)),
    ],
)
def test_idle_shares_of_the_papers(name: str, p: int, m: int, share: Fraction) -> None:
    theory = theoretical_idle_share(name, num_ranks=p, num_microbatches=m)
    assert theory == (pytest.approx(float(share)), True)
    assert replayed(name, p, m).idle_shares == pytest.approx([float(share)] * p)


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, int]:
    """Numbers that fit a schedule, with its name."""
    name = draw(st.sampled_from(SCHEDULES))
    p, m = draw(st.integers(1, 7)), draw(st.integers(1, 24))
    assume(allowed_microbatches(name, p, m))
    per_rank = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dual_pipe_v": 2}.get(name)
    num_stages = p * (per_rank or draw(st.integers(1, 3)))
    return {"name": name, "num_ranks": p, "num_microbatches": m, "num_stages": num_stages}


@st.composite
def durations(draw: st.DrawFn) -> Durations:
    """The default, or any whole numbers."""
    if draw(st.booleans()):
        return Durations()
    forward, backward, halves = (draw(st.integers(1, 6)) for _ in range(3))
    weight = draw(st.integers(1, 6))
    full = draw(st.sampled_from((backward, halves + weight)))
    return Durations(forward=forward, backward=full, backward_input=halves, backward_weight=weight)


@settings(max_examples=200)
@given(sizes(), durations())
def test_the_replay_is_the_closed_form_or_not_below_its_bound(
    numbers: dict[str, int], durations: Durations
) -> None:
    idle = replay(make_schedule(**numbers), durations).idle_share
    theory = theoretical_idle_share(**numbers, durations=durations)
    if theory.exact:
        assert idle == pytest.approx(theory.share, abs=1e-9)
    else:
        assert idle >= theory.share - 1e-9


@settings(max_examples=100)
@given(sizes(), durations())
def test_peak_activations_are_those_of_theory_whatever_the_durations(
    numbers: dict[str, int], durations: Durations
) -> None:
    timeline = replay(make_schedule(**numbers), durations)
    assert timeline.peak_activations == theoretical_peak_activations(**numbers)


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("gpipe", (12, 12, 12, 12)),  # m
        ("1f1b", (4, 3, 2, 1)),  # p - rank
        ("interleaved_1f1b", (11, 9, 7, 5)),
        ("looped_bfs", (24, 24, 24, 24)),  # 2 m
        ("interleaved_zero_bubble", (8, 8, 8, 8)),  # 2 p
        ("zbv", (8, 8, 8, 8)),  # 2 p, half as large: as the first rank of 1f1b
        ("dual_pipe_v", (9, 9, 9, 9)),  # 2 p + 1
    ],
)
def test_peak_activations_of_four_ranks_and_twelve_microbatches(
    name: str, peaks: tuple[int, ...]
) -> None:
    assert theoretical_peak_activations(name, num_ranks=4, num_microbatches=12) == peaks
    assert replayed(name, 4, 12).peak_activations == peaks


def test_fewer_microbatches_than_ranks_leave_more_idle() -> None:
    shares = [
        theoretical_idle_share("1f1b", num_ranks=8, num_microbatches=m).share for m in (1, 4, 8)
    ]
    assert shares == pytest.approx([7 / 8, 7 / 11, 7 / 15])


def test_theory_refuses_what_the_schedule_refuses() -> None:
    with pytest.raises(ConfigError, match="dual_pipe_v"):
        theoretical_idle_share("dual_pipe_v", num_ranks=4, num_microbatches=7)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_largest_tables_are_replayed(name: str) -> None:
    theory = theoretical_idle_share(name, num_ranks=64, num_microbatches=512)
    assert theory.exact
    assert replayed(name, 64, 512).idle_share == pytest.approx(theory.share)
