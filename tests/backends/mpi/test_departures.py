"""Who never comes: a rank that has left before its part, and nobody else."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_shard.backends.mpi.runtime import COLLECTIVE, Departures, Need


class World:
    """As much of a communicator as is needed: what is sent comes at once."""

    size = 3

    def __init__(self, rank: int, boxes: dict[int, list[Any]]) -> None:
        self.rank, self._boxes = rank, boxes

    def isend(self, message: Any, rank: int, tag: int) -> None:
        self._boxes[rank].append(message)

    def improbe(self, tag: int) -> Any:
        box = self._boxes[self.rank]
        return SimpleNamespace(recv=box.pop) if box else None


@pytest.fixture
def departures() -> Departures:
    """What rank 0 knows once rank 2 has left."""
    boxes: dict[int, list[Any]] = {0: [], 1: []}
    gone, here = Departures(), Departures()
    gone.tally("dp").update({COLLECTIVE: 12, "send 0": 3, "recv 0": 1, "recv -1": 1})
    gone.say_goodbye(World(2, boxes), 9)  # type: ignore[arg-type]
    here.listen(World(0, boxes), 9)  # type: ignore[arg-type]
    assert here.num_left == 1
    return here


@pytest.mark.parametrize(
    ("group", "ranks", "parts", "number", "missing"),
    [
        ("dp", (0, 1, 2), [COLLECTIVE], 12, None),
        ("dp", (0, 1, 2), [COLLECTIVE], 13, 2),
        ("dp", (0, 1), [COLLECTIVE], 13, None),
        ("dp", (2,), ["send 0"], 3, None),
        ("dp", (2,), ["send 0"], 4, 2),
        ("dp", (2,), ["recv 0", "recv -1"], 2, None),
        ("dp", (2,), ["recv 0", "recv -1"], 3, 2),
        ("another group", (0, 2), [COLLECTIVE], 1, 2),
        ("dp", (), ["send 0"], 4, None),
    ],
)
def test_only_a_rank_that_left_before_its_part_never_comes(
    departures: Departures,
    group: str,
    ranks: Sequence[int],
    parts: Sequence[str],
    number: int,
    missing: int | None,
) -> None:
    need = Need(group=group, ranks=ranks, parts=parts, number=number)
    assert departures.who_never_comes(need) == missing
