"""One tensor of each rank to one, for every dtype and operation."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from lightning_shard.backends.rank_order import reduce_tensors
from lightning_shard.errors import ConfigError


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_half_types_are_summed_in_fp32(dtype: torch.dtype) -> None:
    # One by one, 1 + 2^-10 + ... would never leave 1 in any of these types.
    tensors = [torch.tensor([1.0]).to(dtype)] + [torch.tensor([2.0**-6]).to(dtype)] * 64
    total = reduce_tensors(tensors)
    assert total.dtype is torch.float32
    assert total.item() == 2.0


def test_sums_in_rank_order() -> None:
    parts = [torch.tensor(value) for value in (1e8, 1.0, -1e8)]
    assert reduce_tensors(parts).item() == ((parts[0] + parts[1]) + parts[2]).item()
    assert parts[0].item() == 1e8


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.SUM, [True, False, True]),
        (ReduceOp.MAX, [True, False, True]),
        (ReduceOp.PRODUCT, [True, False, False]),
        (ReduceOp.MIN, [True, False, False]),
        (ReduceOp.BXOR, [False, False, True]),
    ],
    ids=str,
)
def test_bool_is_reduced_by_logic(op: ReduceOp, expected: list[bool]) -> None:
    parts = [torch.tensor([True, False, True]), torch.tensor([True, False, False])]
    assert reduce_tensors(parts, op).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_wide_unsigned_integers(dtype: torch.dtype) -> None:
    high = torch.iinfo(dtype).max
    parts = [torch.tensor([-1, 1]).to(dtype), torch.tensor([2, 5]).to(dtype)]
    expected = {ReduceOp.SUM: [1, 6], ReduceOp.MIN: [2, 1], ReduceOp.MAX: [high, 5]}
    for op, values in expected.items():
        assert reduce_tensors(parts, op).to(dtype).tolist() == values


def test_integer_average_is_cut_off() -> None:
    parts = [torch.tensor([1, -1]), torch.tensor([2, -2])]
    assert reduce_tensors(parts, ReduceOp.AVG).tolist() == [1, -1]


def test_premultiplied_sum() -> None:
    op = dist._make_nccl_premul_sum(0.5)
    assert reduce_tensors([torch.tensor([2.0]), torch.tensor([4.0])], op).tolist() == [3.0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint64], ids=str)
def test_average_of_bool_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="AVG"):
        reduce_tensors([torch.ones(1).to(dtype)], ReduceOp.AVG)
