"""Combining shards in rank order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.backends.rank_order import (
    ReduceOpName,
    check_op,
    combine_in_rank_order,
    is_narrow,
)
from lightning_shard.errors import ConfigError, LayoutError


def in_rank_order(rows: torch.Tensor, op: ReduceOpName) -> torch.Tensor:
    """Reduce the rows one after the other, in the simplest way."""
    total = rows[0]
    for row in rows[1:]:
        total = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)(total, row)
    return total / len(rows) if op == "avg" else total


@given(
    size=st.integers(2, 6),
    numel=st.sampled_from([1, 3, 1000]),
    op=st.sampled_from(["sum", "avg", "max", "min"]),
    into_own=st.booleans(),
    data=st.data(),
)
def test_every_rank_gets_the_same_bits(
    size: int, numel: int, op: ReduceOpName, into_own: bool, data: st.DataObject
) -> None:
    own = data.draw(st.integers(0, size - 1))
    rows = torch.randn(size, numel, generator=torch.Generator().manual_seed(size))
    shards = list(rows.clone().unbind())
    output = shards[own] if into_own else torch.empty(numel)
    combine_in_rank_order(shards, own, op, output)
    assert torch.equal(output, in_rank_order(rows, op))
    if not into_own:
        assert torch.equal(shards[own], rows[own])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("into_own", [True, False])
@pytest.mark.parametrize("size", [2, 5])
def test_narrow_types_are_rounded_once(
    dtype: torch.dtype, op: ReduceOpName, into_own: bool, size: int
) -> None:
    numel = (1 << 18) + 7  # more than one block
    rows = torch.randn(size, numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    shards = list(rows.clone().unbind())
    output = shards[1] if into_own else torch.empty(numel, dtype=dtype)
    combine_in_rank_order(shards, 1, op, output)
    assert torch.equal(output, in_rank_order(rows.float(), op).to(dtype))


def test_float32_output_keeps_what_a_narrow_type_cannot_hold() -> None:
    shards = [torch.full((2,), 256.0), torch.ones(2), torch.ones(2)]
    output = torch.empty(2)
    combine_in_rank_order([shard.bfloat16() for shard in shards], 1, "sum", output)
    assert output.tolist() == [258.0, 258.0]


def test_float8() -> None:
    shards = [torch.tensor([1.0, 16.0]).to(torch.float8_e4m3fn) for _ in range(2)]
    output = torch.empty(2, dtype=torch.float8_e4m3fn)
    combine_in_rank_order(shards, 0, "sum", output)
    assert output.float().tolist() == [2.0, 32.0]


def test_an_average_of_large_halves_does_not_overflow() -> None:
    shards = [torch.full((2,), 60000.0, dtype=torch.float16) for _ in range(2)]
    combine_in_rank_order(shards, 0, "avg", shards[0])
    assert shards[0].tolist() == [60000.0 // 32 * 32] * 2


def test_nothing_to_combine() -> None:
    empty = torch.empty(0, dtype=torch.bfloat16)
    combine_in_rank_order([empty, empty], 0, "sum", empty)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, True),
        (torch.float8_e4m3fn, True),
        (torch.float32, False),
        (torch.float64, False),
        (torch.int8, False),
    ],
)
def test_is_narrow(dtype: torch.dtype, expected: bool) -> None:
    assert is_narrow(dtype) is expected


def test_check_op() -> None:
    check_op("avg", torch.float16)
    check_op("sum", torch.int64)
    with pytest.raises(ConfigError, match="one of sum, avg, max, min"):
        check_op("mean", torch.float32)
    with pytest.raises(LayoutError, match=r"Cannot average torch\.bool"):
        check_op("avg", torch.bool)
