"""The grid of ranks, also of axes that no strategy has: literal tables and properties."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.core.mesh import AXES, Axis, ParallelMesh, RankGrid, sizes_of
from lightning_shard.errors import ConfigError
from lightning_shard.testing import run_ranks

EIGHT = ParallelMesh(pp=2, dp=2, tp=2)


@st.composite
def meshes(draw: st.DrawFn, most_ranks: int = 4096) -> ParallelMesh:
    """Draw any sizes of up to `most_ranks` ranks in all, in any order of the axes."""
    sizes: dict[str, int] = {}
    for axis in draw(st.permutations(AXES)):
        sizes[axis] = draw(st.integers(1, most_ranks))
        most_ranks //= sizes[axis]
    return ParallelMesh(**sizes, axis_order=tuple(draw(st.permutations(AXES))))


def test_tensor_is_the_fastest_axis() -> None:
    assert EIGHT.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert EIGHT.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert EIGHT.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert EIGHT.coordinates(6) == {"pp": 1, "dp": 1, "tp": 0}


def test_another_order() -> None:
    mesh = ParallelMesh(dp=2, tp=3, axis_order=("tp", "pp", "dp"))
    assert mesh.groups("dp") == [(0, 1), (2, 3), (4, 5)]
    assert mesh.groups("tp") == [(0, 2, 4), (1, 3, 5)]


def test_groups_along_two_axes() -> None:
    assert EIGHT.groups(("pp", "tp")) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert EIGHT.groups(("dp", "tp")) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert EIGHT.groups(["dp", "pp"]) == EIGHT.groups(("pp", "dp")) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert EIGHT.peers(("pp", "tp"), 6) == (2, 3, 6, 7)


def test_groups_along_all_axes_and_along_none() -> None:
    assert EIGHT.groups(AXES) == [tuple(range(8))]
    assert EIGHT.groups(()) == [(rank,) for rank in range(8)]
    assert EIGHT.peers((), 5) == (5,)


def test_groups_along_two_axes_in_another_order() -> None:
    mesh = ParallelMesh(pp=2, dp=2, tp=3, axis_order=("tp", "pp", "dp"))
    assert mesh.groups(("pp", "tp")) == [(0, 2, 4, 6, 8, 10), (1, 3, 5, 7, 9, 11)]
    assert mesh.groups(("dp", "tp")) == [(0, 1, 4, 5, 8, 9), (2, 3, 6, 7, 10, 11)]


@pytest.mark.parametrize("axis", ["xp", ("pp", "xp"), "pptp"])
def test_an_unknown_axis_is_refused(axis: Axis) -> None:
    for ask in (EIGHT.groups, lambda axis: EIGHT.peers(axis, 0)):
        with pytest.raises(
            ConfigError, match=r"got axis .*, expected one or several of pp, dp, tp"
        ):
            ask(axis)


def test_an_axis_of_minus_one_takes_the_rest() -> None:
    assert ParallelMesh.of_world(12, pp=2, tp=3) == ParallelMesh(pp=2, dp=2, tp=3)
    assert ParallelMesh.of_world(12, pp=2, tp=3, dp=-1) == ParallelMesh(pp=2, dp=2, tp=3)
    assert ParallelMesh.of_world(12, pp=2, tp=-1, dp=2) == ParallelMesh(pp=2, dp=2, tp=3)
    assert ParallelMesh.of_world(12, pp=2, tp=3, dp=2) == ParallelMesh(pp=2, dp=2, tp=3)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"world_size": 8, "tp": 3},
            "8 ranks cannot be split into groups of pp=1 times tp=3; expected sizes that divide 8, "
            "got 3. Sizes that fit: pp=1, dp=2, tp=4; pp=1, dp=4, tp=2; pp=2, dp=1, tp=4.",
        ),
        (
            {"world_size": 12, "pp": 2, "dp": 2, "tp": 2},
            "12 ranks cannot be split into groups of pp=2 times dp=2 times tp=2; expected sizes "
            "that multiply to 12, got 8. Sizes that fit: pp=2, dp=3, tp=2; pp=3, dp=2, tp=2; "
            "pp=2, dp=2, tp=3.",
        ),
        (
            {"world_size": 8, "pp": 2, "dp": 0},
            "got pp=2, dp=0, tp=1 for 8 ranks, expected sizes of at least 1, or -1 for one axis, "
            "which takes the remaining ranks. Sizes that fit: pp=2, dp=4, tp=1; "
            "pp=1, dp=8, tp=1; pp=4, dp=2, tp=1.",
        ),
        (
            {"world_size": 8, "pp": -3, "tp": 2},
            "got pp=-3, dp=-1, tp=2 for 8 ranks, expected sizes of at least 1, or -1 for one axis, "
            "which takes the remaining ranks. Sizes that fit: pp=1, dp=4, tp=2; "
            "pp=2, dp=2, tp=2; pp=4, dp=1, tp=2.",
        ),
        (
            {"world_size": 2, "pp": -1},
            "got pp=-1, dp=-1, tp=1 for 2 ranks, expected sizes of at least 1, or -1 for one axis, "
            "which takes the remaining ranks. Sizes that fit: pp=1, dp=2, tp=1; pp=2, dp=1, tp=1; "
            "pp=1, dp=1, tp=2.",
        ),
        ({"world_size": 0}, "got a world of 0 ranks, expected at least 1."),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_sizes_that_do(
    sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelMesh.of_world(**sizes)
    assert str(caught.value) == message


@given(
    world_size=st.integers(1, 4096),
    sizes=st.fixed_dictionaries({axis: st.integers(-2, 64) for axis in AXES}),
)
def test_the_sizes_of_a_world_multiply_to_it_and_so_do_the_proposed_ones(
    world_size: int, sizes: dict[Axis, int]
) -> None:
    try:
        mesh = ParallelMesh.of_world(world_size, **sizes)
    except ConfigError as error:
        proposals = str(error).partition("Sizes that fit: ")[2].rstrip(".").split("; ")
        for proposal in proposals:
            proposed = dict(size.split("=") for size in proposal.split(", "))
            made = {axis: int(size) for axis, size in proposed.items()}
            assert ParallelMesh.of_world(world_size, **made).world_size == world_size
    else:
        assert mesh.world_size == world_size
        assert all(size in (-1, mesh.size(axis)) for axis, size in sizes.items())


def test_what_is_no_grid_is_refused() -> None:
    for name in ("tp", "shard"):
        with pytest.raises(ConfigError, match=rf"ParallelMesh: {name} must be .* got 0"):
            ParallelMesh(**{name: 0})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must name each of"):
        ParallelMesh(axis_order=("dp", "tp", "tp"))
    with pytest.raises(ConfigError, match=r"divide the dp axis, got .*dp=4.* shard=3"):
        ParallelMesh(dp=4, shard=3)
    with pytest.raises(ConfigError, match="got rank 8, expected 0 to 7"):
        EIGHT.coordinates(8)


@given(mesh=meshes(), data=st.data())
def test_coordinates_and_ranks_are_inverse(mesh: ParallelMesh, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    here = mesh.coordinates(rank)
    assert mesh.rank_at(here) == rank
    assert all(0 <= here[axis] < mesh.size(axis) for axis in AXES)


@given(mesh=meshes(), axes=st.lists(st.sampled_from(AXES), unique=True), data=st.data())
def test_groups_part_the_ranks_and_differ_on_their_axes_only(
    mesh: ParallelMesh, axes: list[Axis], data: st.DataObject
) -> None:
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    assert groups == sorted(groups)
    group = data.draw(st.sampled_from(groups))
    assert list(group) == sorted(group)
    assert {mesh.peers(axes, rank) for rank in (group[0], group[-1])} == {group}
    places = [mesh.coordinates(rank) for rank in group]
    for axis in AXES:
        assert len({place[axis] for place in places}) == (mesh.size(axis) if axis in axes else 1)


def test_one_axis_is_a_group_of_axes() -> None:
    for axis in AXES:
        assert EIGHT.groups(axis) == EIGHT.groups((axis,))
        assert EIGHT.peers(axis, 3) == EIGHT.peers([axis], 3)


def test_the_512_ranks_of_a_hundred_billion_parameters() -> None:
    mesh = ParallelMesh.of_world(512, pp=8, tp=8)
    assert mesh.peers("tp", 100) == tuple(range(96, 104))
    assert mesh.peers("dp", 100) == tuple(range(68, 128, 8))
    assert mesh.peers("pp", 100) == tuple(range(36, 512, 64))
    assert mesh.peers(("dp", "tp"), 100) == tuple(range(64, 128))


def test_torchs_mesh_has_the_same_groups() -> None:
    def fn(rank: int) -> None:
        mesh = EIGHT.device_mesh("cpu")
        for axis in AXES:
            group = mesh.get_group(axis)
            assert tuple(group.global_ranks) == EIGHT.peers(axis, rank)

    run_ranks(fn, 8)


def test_repr_is_one_line_that_makes_the_mesh_again() -> None:
    mesh = ParallelMesh(dp=2, tp=3, axis_order=("tp", "pp", "dp"))
    assert repr(EIGHT) == "ParallelMesh(pp=2, dp=2, tp=2)"
    assert repr(mesh) == "ParallelMesh(pp=1, dp=2, tp=3, axis_order=('tp', 'pp', 'dp'))"
    assert eval(repr(mesh)) == mesh


@pytest.mark.parametrize("wrong", [lambda: ParallelMesh(shard=3), lambda: EIGHT.peers("tp", -1)])
def test_errors_name_the_mesh_on_one_line(wrong: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"ParallelMesh\(pp=.*\)\.$") as caught:
        wrong()
    assert "\n" not in str(caught.value)


def test_tensor_groups_inside_nodes_and_pipelines_across_them_need_no_warning() -> None:
    placement = EIGHT.placement(4)
    assert placement.warnings == ()
    assert placement.nodes_per_group == {"tp": 1, "dp": 1, "pp": 2}
    assert str(placement) == (
        "nodes of 4 ranks: 2; tp inside a node; dp inside a node; pp across 2 nodes"
    )
    large = ParallelMesh(pp=8, dp=8, tp=8).placement(8)
    assert large.warnings == ()
    assert str(large) == (
        "nodes of 8 ranks: 64; tp inside a node; dp across 8 nodes; pp across 8 nodes"
    )


def test_one_node_holds_everything() -> None:
    mesh = ParallelMesh(dp=2, tp=3, axis_order=("tp", "dp", "pp"))
    assert mesh.placement(6).warnings == mesh.placement(8).warnings == ()
    assert str(mesh.placement(8)) == "nodes of 8 ranks: 1; tp inside a node; dp inside a node"
    assert str(ParallelMesh().placement(1)) == "nodes of 1 ranks: 1"


@pytest.mark.parametrize(
    ("mesh", "ranks_per_node", "warnings"),
    [
        (
            ParallelMesh(tp=8),
            4,
            "1 of 1 tp groups cross nodes of 4 ranks, such as ranks 0, 1, ..., 7: every layer "
            "waits for the network between them; sizes that keep tp inside a node: "
            "pp=1, dp=2, tp=4; pp=2, dp=1, tp=4; pp=1, dp=4, tp=2.",
        ),
        (
            ParallelMesh(pp=2, dp=2, tp=2, axis_order=("tp", "dp", "pp")),
            4,
            "4 of 4 tp groups cross nodes of 4 ranks, such as ranks 0, 4: every layer "
            "waits for the network between them; axis_order=('pp', 'dp', 'tp') keeps tp inside a "
            "node.",
        ),
        (
            ParallelMesh(dp=2, tp=4, axis_order=("tp", "dp", "pp")),
            2,
            "2 of 2 tp groups cross nodes of 2 ranks, such as ranks 0, 2, 4, 6: every layer "
            "waits for the network between them; sizes that keep tp inside a node, with "
            "axis_order=('pp', 'dp', 'tp'): pp=1, dp=4, tp=2; pp=2, dp=2, tp=2; pp=4, dp=1, tp=2.",
        ),
        (
            ParallelMesh(dp=4, tp=3),
            8,
            "1 of 4 tp groups cross nodes of 8 ranks, such as ranks 6, 7, 8: every layer "
            "waits for the network between them; sizes that keep tp inside a node: "
            "pp=1, dp=3, tp=4; pp=1, dp=6, tp=2; pp=2, dp=3, tp=2.",
        ),
        (
            ParallelMesh(pp=2, dp=2, tp=2, axis_order=("dp", "pp", "tp")),
            4,
            "dp crosses nodes of 4 ranks and pp does not, though a model's gradients are more "
            "than what passes between its stages; axis_order=('pp', 'dp', 'tp') puts pp across "
            "nodes.",
        ),
    ],
)
def test_a_placement_that_will_be_slow_is_said_with_what_would_not(
    mesh: ParallelMesh, ranks_per_node: int, warnings: str
) -> None:
    assert mesh.placement(ranks_per_node).warnings == (warnings,)


def test_no_ranks_per_node_are_refused() -> None:
    with pytest.raises(ConfigError, match="got 0 ranks per node, expected at least 1"):
        EIGHT.placement(0)


@given(mesh=meshes(most_ranks=64), ranks_per_node=st.integers(1, 64))
def test_tp_is_warned_of_when_a_group_has_ranks_on_two_nodes(
    mesh: ParallelMesh, ranks_per_node: int
) -> None:
    placement = mesh.placement(ranks_per_node)
    crosses = any(g[0] // ranks_per_node != g[-1] // ranks_per_node for g in mesh.groups("tp"))
    assert crosses == any("every layer waits" in warning for warning in placement.warnings)
    assert crosses == (placement.nodes_per_group.get("tp", 1) > 1)


@given(mesh=meshes(most_ranks=256), ranks_per_node=st.integers(1, 64))
def test_what_a_warning_proposes_needs_no_warning(mesh: ParallelMesh, ranks_per_node: int) -> None:
    for warning in mesh.placement(ranks_per_node).warnings:
        order = AXES if "axis_order" in warning else mesh.axis_order
        proposals = re.findall(r"pp=(\d+), dp=(\d+), tp=(\d+)", warning)
        for pp, dp, tp in proposals or [(mesh.pp, mesh.dp, mesh.tp)]:
            better = ParallelMesh(pp=int(pp), dp=int(dp), tp=int(tp), axis_order=order)
            assert better.world_size == mesh.world_size
            found = better.placement(ranks_per_node)
            assert found.nodes_per_group.get("tp", 1) == 1 or warning.startswith("dp")
            assert found.nodes_per_group.get("pp", 2) > 1 or not warning.startswith("dp")


def test_a_mesh_with_parts_of_sequences_has_an_axis_more_and_others_do_not() -> None:
    mesh = ParallelMesh(pp=2, cp=2, tp=2)
    assert mesh.axis_order == ("pp", "dp", "cp", "tp")
    assert mesh.groups("cp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.peers(("dp", "cp"), 5) == (5, 7)
    assert repr(mesh) == "ParallelMesh(pp=2, dp=1, cp=2, tp=2)"
    assert ParallelMesh.of_world(8, cp=2, tp=2) == ParallelMesh(dp=2, cp=2, tp=2)
    first = ParallelMesh(cp=2, tp=2, axis_order=("cp", "pp", "dp", "tp"))
    assert first.groups("cp") == [(0, 2), (1, 3)]
    alone = ParallelMesh(dp=2, tp=2, axis_order=("cp", "pp", "dp", "tp"))
    assert alone == ParallelMesh(dp=2, tp=2)
    assert alone.peers("cp", 3) == (3,)
    assert alone.peers(("dp", "cp"), 3) == (1, 3)


def test_experts_are_shared_by_neighbours_beside_other_axes() -> None:
    mesh = ParallelMesh(dp=2, ep=2, tp=2)
    assert mesh.axis_order == ("pp", "dp", "ep", "tp")
    assert mesh.groups("ep") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.groups("dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.peers(("dp", "ep"), 5) == (1, 3, 5, 7)
    assert repr(mesh) == "ParallelMesh(pp=1, dp=2, ep=2, tp=2)"
    assert ParallelMesh.of_world(8, ep=2, tp=2) == mesh
    both = ParallelMesh(dp=2, ep=2, cp=2, tp=2)
    assert both.axis_order == ("pp", "dp", "ep", "cp", "tp")
    first = ParallelMesh(ep=2, tp=2, axis_order=("ep", "pp", "dp", "tp"))
    assert first.groups("ep") == [(0, 2), (1, 3)]
    assert ParallelMesh(dp=2, tp=2, axis_order=("ep", "pp", "dp", "tp")).axes == AXES
    with pytest.raises(ConfigError, match=r"ep=4 times tp=1"):
        ParallelMesh.of_world(6, ep=4)


def test_a_mesh_that_does_not_hold_the_parts_of_sequences_is_refused_with_sizes_that_do() -> None:
    with pytest.raises(ConfigError, match=r"cp=4 times tp=1.*Sizes that fit: pp=1, dp=2, cp=3, tp"):
        ParallelMesh.of_world(6, cp=4)


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
