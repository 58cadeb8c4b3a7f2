"""Flat layouts, and buffers that are cut between parameters: literal tables, and properties."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.core.layout import (
    ShardSlice,
    assign_owners,
    build_layout,
    build_owned_layout,
)
from lightning_shard.errors import LayoutError


def test_two_ranks_share_a_weight_that_straddles_the_cut() -> None:
    layout = build_layout([("weight", (3, 2)), ("bias", (3,))], num_shards=2, align=1)
    weight, bias = layout.slots
    assert (weight.offset, bias.offset, layout.shard_numel, layout.full_numel) == (0, 6, 5, 10)
    assert list(layout.shard_slices(0)) == [
        ShardSlice(shard_offset=0, param_offset=0, numel=5),
        ShardSlice(shard_offset=0, param_offset=0, numel=0),
    ]
    assert list(layout.shard_slices(1)) == [
        ShardSlice(shard_offset=0, param_offset=5, numel=1),
        ShardSlice(shard_offset=1, param_offset=0, numel=3),
    ]


def test_alignment_moves_slots_and_shards() -> None:
    layout = build_layout([("a", (3,)), ("b", (5,))], num_shards=3, align=4)
    assert [slot.offset for slot in layout.slots] == [0, 4]
    assert layout.shard_numel == 4
    assert layout.shard_bounds(2) == (8, 12)


def test_scalars_and_empty_parameters_have_a_place() -> None:
    layout = build_layout([("scale", ()), ("nothing", (0, 4)), ("w", (2,))], num_shards=1)
    assert [slot.numel for slot in layout.slots] == [1, 0, 2]
    assert layout.shard_slice(layout.slots[1], 0).numel == 0


@pytest.mark.parametrize(
    ("shapes", "num_shards", "align"),
    [([], 1, 1), ([("a", (1,))], 0, 1), ([("a", (1,))], 1, 0), ([("a", (1,)), ("a", (2,))], 1, 1)],
)
def test_refusals(shapes: list[tuple[str, tuple[int, ...]]], num_shards: int, align: int) -> None:
    with pytest.raises(LayoutError):
        build_layout(shapes, num_shards=num_shards, align=align)


@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=12),
    num_shards=st.integers(1, 9),
    align=st.sampled_from([1, 4, 8]),
)
def test_shards_cover_every_parameter_once(
    shapes: list[list[int]], num_shards: int, align: int
) -> None:
    named = [(f"p{i}", tuple(shape)) for i, shape in enumerate(shapes)]
    layout = build_layout(named, num_shards=num_shards, align=align)
    for slot in layout.slots:
        assert slot.offset % align == 0
        shard_slices = [layout.shard_slice(slot, shard) for shard in range(num_shards)]
        owned = [i for p in shard_slices for i in range(p.param_offset, p.param_stop)]
        assert owned == list(range(prod(slot.shape)))
        assert all(p.shard_stop <= layout.shard_numel for p in shard_slices)
    assert max(slot.stop for slot in layout.slots) <= layout.full_numel
    total = sum(slot.numel for slot in layout.slots)
    padding = layout.full_numel - total
    assert padding < align * (len(layout.slots) + num_shards) + num_shards


def test_the_greatest_parameters_are_given_first_to_those_that_have_least() -> None:
    assert assign_owners([3, 8, 2, 6, 5], num_ranks=2) == [0, 0, 0, 1, 1]


def test_each_parameter_lies_full_on_its_owner() -> None:
    shapes = [("a", (2, 3)), ("b", (3,)), ("c", (2, 2))]
    layout = build_owned_layout(shapes, [0, 2, 2], num_shards=4, align=4)
    assert [slot.offset for slot in layout.slots] == [0, 8, 12]
    assert layout.cuts == (0, 8, 8, 16, 16)
    assert layout.shard_numels == (8, 0, 8, 0)
    assert layout.full_numel == 16
    assert list(layout.shard_slices(2)) == [
        ShardSlice(shard_offset=0, param_offset=0, numel=0),
        ShardSlice(shard_offset=0, param_offset=0, numel=3),
        ShardSlice(shard_offset=4, param_offset=0, numel=4),
    ]


@pytest.mark.parametrize("owners", [[1, 0], [0], [0, 2]])
def test_owners_that_do_not_fit_are_refused(owners: list[int]) -> None:
    with pytest.raises(LayoutError, match="needs an owner of each of its 2 parameters"):
        build_owned_layout([("a", (1,)), ("b", (2,))], owners, num_shards=2)


@given(numels=st.lists(st.integers(0, 50), min_size=1, max_size=20), num_ranks=st.integers(1, 6))
def test_a_rank_owns_at_most_its_part_and_one_parameter_more(
    numels: list[int], num_ranks: int
) -> None:
    owners = assign_owners(numels, num_ranks=num_ranks)
    held = [
        sum(numel for numel, owner in zip(numels, owners, strict=True) if owner == rank)
        for rank in range(num_ranks)
    ]
    assert max(held) <= sum(numels) / num_ranks + max(numels)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=12),
    align=st.sampled_from([1, 4]),
)
def test_owners_alone_have_elements_and_have_all(sizes: list[tuple[int, int]], align: int) -> None:
    owners = sorted(owner for _, owner in sizes)
    named = [(f"p{index}", (numel,)) for index, (numel, _) in enumerate(sizes)]
    layout = build_owned_layout(named, owners, num_shards=5, align=align)
    assert sum(layout.shard_numels) == layout.full_numel
    for slot, owner in zip(layout.slots, owners, strict=True):
        held = [layout.shard_slice(slot, rank).numel for rank in range(5)]
        assert held == [slot.numel * (rank == owner) for rank in range(5)]
