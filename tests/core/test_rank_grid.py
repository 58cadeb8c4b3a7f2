"""Grids of named axes as literal tables, also of axes that no strategy has."""

import pytest

from lightning_shard.core.mesh import RankGrid, sizes_of
from lightning_shard.errors import ConfigError

GRID = RankGrid({"outer": 2, "middle": 3, "inner": 2})


def test_the_last_axis_is_the_fastest() -> None:
    assert [GRID.rank_at(GRID.coordinates(rank)) for rank in range(12)] == list(range(12))
    assert GRID.coordinates(9) == {"inner": 1, "middle": 1, "outer": 1}
    assert GRID.rank_at({"middle": 2}) == 4
    assert GRID.num_ranks == 12


def test_groups_lie_along_any_axes() -> None:
    assert GRID.groups("middle") == [(0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11)]
    assert GRID.groups(["inner", "outer"]) == [(0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11)]
    assert GRID.peers("outer", 9) == (3, 9)
    with pytest.raises(ConfigError, match="'cp', expected one or several of outer, middle, inner"):
        GRID.peers("cp", 0)


def test_every_size_of_a_world() -> None:
    assert list(sizes_of(4, ("a", "b"))) == [{"a": 1, "b": 4}, {"a": 2, "b": 2}, {"a": 4, "b": 1}]
    assert len(list(sizes_of(8, ("a", "b", "c")))) == 10
