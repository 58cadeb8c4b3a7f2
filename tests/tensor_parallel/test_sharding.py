"""The split of one parameter: literal tables, and back again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.errors import LayoutError
from lightning_shard.tensor_parallel.sharding import Sharding


def test_a_plain_matrix_is_cut_evenly() -> None:
    full = torch.arange(8).view(4, 2)
    rows = Sharding(dim=0, blocks=(4,), num_shards=2)
    columns = Sharding(dim=1, blocks=(2,), num_shards=2)
    assert rows.shard(full, 1).tolist() == [[4, 5], [6, 7]]
    assert columns.shard(full, 1).tolist() == [[1], [3], [5], [7]]


def test_each_block_of_a_fused_matrix_is_cut() -> None:
    fused = Sharding(dim=0, blocks=(4, 2, 2), num_shards=2)
    assert fused.shard(torch.arange(8), 0).tolist() == [0, 1, 4, 6]
    assert fused.shard(torch.arange(8), 1).tolist() == [2, 3, 5, 7]
    assert fused.local_blocks == (2, 1, 1)


def test_an_uneven_block_names_the_sizes_that_work() -> None:
    with pytest.raises(LayoutError, match=r"6 elements .* over 4 ranks; .* is one of 2, 3, 6\."):
        Sharding(dim=0, blocks=(12, 6), num_shards=4)
    with pytest.raises(LayoutError, match=r"is 1\."):
        Sharding(dim=0, blocks=(3, 4), num_shards=2)


@given(
    num_shards=st.integers(1, 4),
    factors=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    dim=st.integers(0, 2),
)
def test_shards_make_the_full_again(num_shards: int, factors: list[int], dim: int) -> None:
    blocks = tuple(num_shards * factor for factor in factors)
    sharding = Sharding(dim=dim, blocks=blocks, num_shards=num_shards)
    shape = [2, 3, 2]
    shape[dim] = sum(blocks)
    full = torch.randn(shape)
    shards = [sharding.shard(full, index) for index in range(num_shards)]
    assert all(shard.shape == sharding.local_shape(shape) for shard in shards)
    assert torch.equal(sharding.assemble(shards), full)
