"""Why the halves of a backward are joined beside activation checkpointing: time against memory."""

from dataclasses import dataclass

import pytest

from lightning_shard.pipeline_parallel.schedules import Schedule, make_schedule, with_full_backwards
from lightning_shard.pipeline_parallel.simulation import Durations, replay

APART = Durations(forward=1, backward_input=2, backward_weight=1, backward=3)
JOINED = Durations(forward=1, backward=3)


@dataclass(frozen=True)
class Figures:
    """What a schedule does with checkpoints.

    Attributes:
        kept: Most stage-microbatches of a rank between the halves, which are in full.
        in_flight: Most between forward and backward, of which the blocks' inputs are kept.
        apart: Idle share in percent, the halves apart.
        joined: Idle share in percent, joined.
    """

    kept: int
    in_flight: int
    apart: float
    joined: float


TABLE = {  # by schedule, ranks and microbatches; as in docs/activation_checkpointing.md
    ("interleaved_zero_bubble", 4, 8): Figures(4, 8, 8.6, 15.8),
    ("interleaved_zero_bubble", 4, 16): Figures(4, 8, 4.5, 8.6),
    ("interleaved_zero_bubble", 8, 32): Figures(8, 16, 5.2, 9.9),
    ("zbv", 4, 8): Figures(7, 8, 8.6, 22.0),
    ("zbv", 4, 16): Figures(7, 8, 4.5, 12.3),
    ("zbv", 8, 32): Figures(15, 16, 5.2, 14.1),
    ("dual_pipe_v", 4, 8): Figures(4, 9, 11.1, 21.0),
    ("dual_pipe_v", 4, 16): Figures(4, 9, 5.9, 11.7),
    ("dual_pipe_v", 8, 32): Figures(8, 17, 7.2, 13.8),
}


def most_between(table: Schedule, begins: str, ends: str) -> int:
    most = 0
    for row in table.actions:
        found = set[tuple[int, int]]()
        for stage, kind, microbatch in row:
            if kind == begins:
                found.add((stage, microbatch))
            elif kind in ends:
                found.discard((stage, microbatch))
            most = max(most, len(found))
    return most


def idle(table: Schedule, durations: Durations) -> float:
    return round(100 * sum(replay(table, durations).idle_shares) / table.num_ranks, 1)


def made(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    return make_schedule(
        name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_stages=2 * num_ranks
    )


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_apart_they_would_keep_up_to_all_of_what_is_in_flight(case: tuple[str, int, int]) -> None:
    table = made(*case)
    assert TABLE[case] == Figures(
        kept=most_between(table, "I", "W"),
        in_flight=most_between(table, "F", "BW"),
        apart=idle(table, APART),
        joined=idle(with_full_backwards(table), JOINED),
    )


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_interleaved_1f1b_waits_no_longer_than_joined_halves(case: tuple[str, int, int]) -> None:
    assert idle(made("interleaved_1f1b", *case[1:]), JOINED) <= TABLE[case].joined
