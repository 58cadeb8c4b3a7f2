"""`torch.distributed`'s reductions: every operator, every form, every type."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from lightning_shard.backends._c10d import reduce_scatter_flat
from lightning_shard.backends.collectives import Collectives
from tests.backends.conformance.suite import check, check_each
from tests.backends.conformance.tensors import (
    DTYPES,
    all_values,
    assert_same,
    own_slice,
    sum_of_values,
    values,
)

NUMBER_OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "PRODUCT": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    "MIN": lambda stacked: stacked.amin(0),
    "MAX": lambda stacked: stacked.amax(0),
}
BIT_OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


@check_each(DTYPES)
def all_reduce_of(collectives: Collectives, dtype: torch.dtype) -> None:
    tensor = values(collectives.rank, 17, dtype)
    dist.all_reduce(tensor, group=collectives.group)
    assert_same(tensor, sum_of_values(collectives.size, 17, dtype))


@check_each(DTYPES)
def reduce_scatter_of(collectives: Collectives, dtype: torch.dtype) -> None:
    size = collectives.size
    output = torch.zeros(3, dtype=dtype)
    reduce_scatter_flat(output, values(collectives.rank, 3 * size, dtype), group=collectives.group)
    assert_same(output, own_slice(collectives, sum_of_values(size, 3 * size, dtype)))


@check_each(NUMBER_OPS)
def all_reduce_by(collectives: Collectives, op: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64):
        tensor = values(collectives.rank, 9, dtype)
        dist.all_reduce(tensor, getattr(ReduceOp, op), group=collectives.group)
        assert_same(tensor, NUMBER_OPS[op](all_values(collectives.size, 9, dtype)))


@check_each(BIT_OPS)
def all_reduce_bitwise_by(collectives: Collectives, op: str) -> None:
    for dtype in (torch.int32, torch.uint8, torch.int64):
        tensor = values(collectives.rank, 9, dtype)
        dist.all_reduce(tensor, getattr(ReduceOp, op), group=collectives.group)
        expected = values(0, 9, dtype)
        for rank in range(1, collectives.size):
            expected = BIT_OPS[op](expected, values(rank, 9, dtype))
        assert_same(tensor, expected)


@check
def all_reduce_by_AVG(collectives: Collectives) -> None:  # noqa: N802 - the operator's name
    tensor = torch.full((3,), float(collectives.rank))
    dist.all_reduce(tensor, ReduceOp.AVG, group=collectives.group)
    assert_same(tensor, torch.full((3,), (collectives.size - 1) / 2))


@check
def all_reduce_by_AVG_of_integers(collectives: Collectives) -> None:  # noqa: N802
    tensor = torch.full((3,), 4, dtype=torch.int64)
    dist.all_reduce(tensor, ReduceOp.AVG, group=collectives.group)
    assert_same(tensor, torch.full((3,), 4, dtype=torch.int64))


@check
def all_reduce_by_PREMUL_SUM(collectives: Collectives) -> None:  # noqa: N802
    tensor = torch.ones(3)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5), group=collectives.group)
    assert_same(tensor, torch.full((3,), collectives.size / 2))


@check
def all_reduce_by_MAX_of_bool(collectives: Collectives) -> None:  # noqa: N802
    tensor = torch.tensor([collectives.rank == 0, False, True])
    dist.all_reduce(tensor, ReduceOp.MAX, group=collectives.group)
    assert_same(tensor, torch.tensor([True, False, True]))


@check
def all_reduce_of_a_matrix(collectives: Collectives) -> None:
    matrix, scalar = torch.ones(2, 3), torch.tensor(2.0)
    dist.all_reduce(matrix, group=collectives.group)
    dist.all_reduce(scalar, group=collectives.group)
    assert_same(matrix, torch.full((2, 3), float(collectives.size)))
    assert_same(scalar, torch.tensor(2.0 * collectives.size))


@check
def all_reduce_of_nothing(collectives: Collectives) -> None:
    empty = torch.empty(0, 4)
    dist.all_reduce(empty, group=collectives.group)
    assert empty.shape == (0, 4)


@check
def all_reduce_of_a_view_with_strides(collectives: Collectives) -> None:
    tensor = torch.ones(4, 3).t()
    dist.all_reduce(tensor, group=collectives.group)
    assert_same(tensor, torch.full((3, 4), float(collectives.size)))


@check
def all_reduce_of_megabytes(collectives: Collectives) -> None:
    tensor = values(collectives.rank, 1_000_003)
    dist.all_reduce(tensor, group=collectives.group)
    assert_same(tensor, sum_of_values(collectives.size, 1_000_003))


@check
def all_reduce_gives_the_same_bits_again(collectives: Collectives) -> None:
    torch.manual_seed(collectives.rank)
    source = torch.randn(50_001)
    runs = [source.clone() for _ in range(3)]
    for tensor in runs:
        dist.all_reduce(tensor, group=collectives.group)
        assert_same(tensor, runs[0])
    sums: list[float | None] = [None] * collectives.size
    dist.all_gather_object(sums, runs[0].double().sum().item(), group=collectives.group)
    assert len(set(sums)) == 1


@check
def reduce_to_every_rank(collectives: Collectives) -> None:
    for root in range(collectives.size):
        for op in ("SUM", "MAX"):
            tensor = values(collectives.rank, 8)
            dist.reduce(tensor, op=getattr(ReduceOp, op), group=collectives.group, group_dst=root)
            if collectives.rank == root:
                assert_same(tensor, NUMBER_OPS[op](all_values(collectives.size, 8)))


@check
def reduce_scatter_of_a_list(collectives: Collectives) -> None:
    size = collectives.size
    inputs = [values(collectives.rank + slot, 4) for slot in range(size)]
    output = torch.zeros(4)
    dist.reduce_scatter(output, inputs, group=collectives.group)
    assert_same(output, sum(values(rank + collectives.rank, 4) for rank in range(size)))


@check
def reduce_scatter_of_an_uneven_list(collectives: Collectives) -> None:
    size = collectives.size
    output = torch.zeros(collectives.rank + 1)
    inputs = [torch.full((slot + 1,), float(slot)) for slot in range(size)]
    dist.reduce_scatter(output, inputs, group=collectives.group)
    assert_same(output, torch.full((collectives.rank + 1,), float(size * collectives.rank)))


@check
def reduce_scatter_of_matrices(collectives: Collectives) -> None:
    output = torch.zeros(2, 3)
    source = torch.ones(2 * collectives.size, 3)
    reduce_scatter_flat(output, source, group=collectives.group)
    assert_same(output, torch.full((2, 3), float(collectives.size)))


@check
def reduce_scatter_by_MAX(collectives: Collectives) -> None:  # noqa: N802
    size = collectives.size
    output = torch.zeros(4)
    source = values(collectives.rank, 4 * size)
    reduce_scatter_flat(output, source, ReduceOp.MAX, group=collectives.group)
    assert_same(output, own_slice(collectives, all_values(size, 4 * size).amax(0)))


@check
def reduce_scatter_by_AVG(collectives: Collectives) -> None:  # noqa: N802
    output = torch.zeros(2)
    source = torch.full((2 * collectives.size,), float(collectives.rank))
    reduce_scatter_flat(output, source, ReduceOp.AVG, group=collectives.group)
    assert_same(output, torch.full((2,), (collectives.size - 1) / 2))


@check
def reduce_scatter_of_nothing(collectives: Collectives) -> None:
    output = torch.empty(0)
    reduce_scatter_flat(output, torch.empty(0), group=collectives.group)
    assert output.numel() == 0


@check
def reduce_scatter_of_megabytes(collectives: Collectives) -> None:
    size, numel = collectives.size, 300_001
    output = torch.zeros(numel)
    source = values(collectives.rank, numel * size)
    reduce_scatter_flat(output, source, group=collectives.group)
    assert_same(output, own_slice(collectives, sum_of_values(size, numel * size)))
