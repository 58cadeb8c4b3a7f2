"""Buffers that are cut between parameters, as literal tables and as properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.core.layout.flat import ShardSlice
from lightning_shard.core.layout.owned import assign_owners, build_owned_layout
from lightning_shard.errors import LayoutError


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
