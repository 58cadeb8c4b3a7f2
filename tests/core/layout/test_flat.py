"""Flat layouts, as literal tables and as properties."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.core.layout.flat import ShardSlice, build_layout
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
