"""The grid of ranks: literal tables and properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.errors import ConfigError
from lightning_shard.mesh import AXES, ParallelMesh
from lightning_shard.testing import run_ranks

EIGHT = ParallelMesh(pp=2, dp=2, tp=2)


def test_tensor_is_the_fastest_axis() -> None:
    assert EIGHT.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert EIGHT.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert EIGHT.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert EIGHT.coordinates(6) == {"pp": 1, "dp": 1, "tp": 0}


def test_another_order() -> None:
    mesh = ParallelMesh(dp=2, tp=3, axis_order=("tp", "pp", "dp"))
    assert mesh.groups("dp") == [(0, 1), (2, 3), (4, 5)]
    assert mesh.groups("tp") == [(0, 2, 4), (1, 3, 5)]


def test_the_dp_axis_takes_the_rest() -> None:
    assert ParallelMesh.of_world(12, pp=2, tp=3).dp == 2
    with pytest.raises(ConfigError, match=r"8 ranks cannot .* expected a product of 1, 2, 4, 8"):
        ParallelMesh.of_world(8, tp=3)


def test_what_is_no_grid_is_refused() -> None:
    with pytest.raises(ConfigError, match="tp axis must have at least 1"):
        ParallelMesh(tp=0)
    with pytest.raises(ConfigError, match="must name each of"):
        ParallelMesh(axis_order=("dp", "tp", "tp"))
    with pytest.raises(ConfigError, match="got rank 8, expected 0 to 7"):
        EIGHT.coordinates(8)


@given(sizes=st.tuples(*[st.integers(1, 4)] * 3), order=st.permutations(AXES), data=st.data())
def test_coordinates_and_ranks_are_inverse(
    sizes: tuple[int, int, int], order: list[str], data: st.DataObject
) -> None:
    mesh = ParallelMesh(
        **dict(zip(AXES, sizes, strict=True)),
        axis_order=order,  # type: ignore[arg-type]
    )
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    assert mesh.rank_at(mesh.coordinates(rank)) == rank
    for axis in AXES:
        assert rank in mesh.peers(axis, rank)
        everyone = sorted(member for group in mesh.groups(axis) for member in group)
        assert everyone == list(range(mesh.world_size))


def test_torchs_mesh_has_the_same_groups() -> None:
    def fn(rank: int) -> None:
        mesh = EIGHT.device_mesh("cpu")
        for axis in AXES:
            group = mesh.get_group(axis)
            assert tuple(group.global_ranks) == EIGHT.peers(axis, rank)

    run_ranks(fn, 8)
