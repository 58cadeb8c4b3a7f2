"""`torch.distributed`'s copying collectives: broadcast, gather, scatter, all-gather, all-to-all."""

import torch
import torch.distributed as dist

from lightning_shard.backends._c10d import all_gather_flat
from lightning_shard.backends.collectives import Collectives
from tests.backends.conformance.suite import check, check_each
from tests.backends.conformance.tensors import DTYPES, all_values, assert_same, values


@check_each(DTYPES)
def broadcast_of(collectives: Collectives, dtype: torch.dtype) -> None:
    tensor = values(collectives.rank, 11, dtype)
    dist.broadcast(tensor, group_src=0, group=collectives.group)
    assert_same(tensor, values(0, 11, dtype))


@check_each(DTYPES)
def all_gather_of(collectives: Collectives, dtype: torch.dtype) -> None:
    output = torch.zeros(5 * collectives.size, dtype=dtype)
    all_gather_flat(output, values(collectives.rank, 5, dtype), group=collectives.group)
    assert_same(output, all_values(collectives.size, 5, dtype).view(-1))


@check_each(DTYPES)
def all_to_all_of(collectives: Collectives, dtype: torch.dtype) -> None:
    output = torch.zeros(2 * collectives.size, dtype=dtype)
    source = values(collectives.rank, 2 * collectives.size, dtype)
    dist.all_to_all_single(output, source, group=collectives.group)
    everything = all_values(collectives.size, 2 * collectives.size, dtype)
    first = 2 * collectives.rank
    assert_same(output, everything[:, first : first + 2].reshape(-1))


@check
def broadcast_of_a_matrix_from_every_rank(collectives: Collectives) -> None:
    for root in range(collectives.size):
        tensor = values(collectives.rank, 6).view(2, 3)
        dist.broadcast(tensor, group_src=root, group=collectives.group)
        assert_same(tensor, values(root, 6).view(2, 3))


@check
def broadcast_of_a_scalar_and_of_nothing(collectives: Collectives) -> None:
    scalar, empty = torch.tensor(float(collectives.rank)), torch.empty(0)
    dist.broadcast(scalar, group_src=collectives.size - 1, group=collectives.group)
    dist.broadcast(empty, group_src=0, group=collectives.group)
    assert_same(scalar, torch.tensor(collectives.size - 1.0))


@check
def broadcast_of_a_view_with_strides(collectives: Collectives) -> None:
    tensor = values(collectives.rank, 6).view(2, 3).t()
    dist.broadcast(tensor, group_src=0, group=collectives.group)
    assert_same(tensor, values(0, 6).view(2, 3).t())


@check
def broadcast_of_megabytes(collectives: Collectives) -> None:
    tensor = values(collectives.rank, 1_000_003)
    dist.broadcast(tensor, group_src=collectives.size - 1, group=collectives.group)
    assert_same(tensor, values(collectives.size - 1, 1_000_003))


@check
def all_gather_into_a_list(collectives: Collectives) -> None:
    outputs = [torch.zeros(2, 3) for _ in range(collectives.size)]
    dist.all_gather(outputs, values(collectives.rank, 6).view(2, 3), group=collectives.group)
    for rank, output in enumerate(outputs):
        assert_same(output, values(rank, 6).view(2, 3))


@check
def all_gather_into_an_uneven_list(collectives: Collectives) -> None:
    outputs = [torch.zeros(rank + 1) for rank in range(collectives.size)]
    dist.all_gather(
        outputs, values(collectives.rank, collectives.rank + 1), group=collectives.group
    )
    for rank, output in enumerate(outputs):
        assert_same(output, values(rank, rank + 1))


@check
def all_gather_of_scalars_and_of_nothing(collectives: Collectives) -> None:
    outputs = [torch.zeros(()) for _ in range(collectives.size)]
    dist.all_gather(outputs, torch.tensor(float(collectives.rank)), group=collectives.group)
    assert [output.item() for output in outputs] == list(range(collectives.size))
    all_gather_flat(torch.empty(0), torch.empty(0), group=collectives.group)


@check
def all_gather_of_matrices_stacked(collectives: Collectives) -> None:
    output = torch.zeros(collectives.size, 2, 3)
    all_gather_flat(output, values(collectives.rank, 6).view(2, 3), group=collectives.group)
    assert_same(output, all_values(collectives.size, 6).view(-1, 2, 3))


@check
def all_gather_of_a_view_with_strides(collectives: Collectives) -> None:
    outputs = [torch.zeros(3, 2) for _ in range(collectives.size)]
    dist.all_gather(outputs, values(collectives.rank, 6).view(2, 3).t(), group=collectives.group)
    for rank, output in enumerate(outputs):
        assert_same(output, values(rank, 6).view(2, 3).t())


@check
def all_gather_of_megabytes(collectives: Collectives) -> None:
    output = torch.zeros(300_001 * collectives.size)
    all_gather_flat(output, values(collectives.rank, 300_001), group=collectives.group)
    assert_same(output, all_values(collectives.size, 300_001).view(-1))


@check
def gather_on_every_rank(collectives: Collectives) -> None:
    for root in range(collectives.size):
        outputs = [torch.zeros(4) for _ in range(collectives.size)]
        dist.gather(
            values(collectives.rank, 4),
            outputs if collectives.rank == root else None,
            group=collectives.group,
            group_dst=root,
        )
        if collectives.rank == root:
            for rank, output in enumerate(outputs):
                assert_same(output, values(rank, 4))


@check
def scatter_from_every_rank(collectives: Collectives) -> None:
    for root in range(collectives.size):
        inputs = [values(root + slot, 4) for slot in range(collectives.size)]
        output = torch.zeros(4)
        dist.scatter(
            output,
            inputs if collectives.rank == root else None,
            group=collectives.group,
            group_src=root,
        )
        assert_same(output, values(root + collectives.rank, 4))


@check
def all_to_all_of_a_list(collectives: Collectives) -> None:
    size, rank = collectives.size, collectives.rank
    outputs = [torch.zeros(2) for _ in range(size)]
    inputs = [torch.full((2,), 10.0 * rank + slot) for slot in range(size)]
    dist.all_to_all(outputs, inputs, group=collectives.group)
    assert [one.tolist() for one in outputs] == [[10.0 * peer + rank] * 2 for peer in range(size)]


@check
def all_to_all_of_an_uneven_list(collectives: Collectives) -> None:
    size, rank = collectives.size, collectives.rank
    outputs = [torch.zeros(rank + 1) for _ in range(size)]
    inputs = [torch.full((slot + 1,), float(rank)) for slot in range(size)]
    dist.all_to_all(outputs, inputs, group=collectives.group)
    assert [one.tolist() for one in outputs] == [[float(peer)] * (rank + 1) for peer in range(size)]


@check
def all_to_all_of_uneven_rows(collectives: Collectives) -> None:
    size, rank = collectives.size, collectives.rank
    given = list(range(size))  # rank i gets i rows of everyone
    output = torch.zeros(rank * size, 2)
    source = torch.full((sum(given), 2), float(rank))
    dist.all_to_all_single(output, source, [rank] * size, given, group=collectives.group)
    expected = [[float(peer)] * 2 for peer in range(size) for _ in range(rank)]
    assert output.tolist() == expected


@check
def all_to_all_of_nothing(collectives: Collectives) -> None:
    output = torch.empty(0)
    dist.all_to_all_single(output, torch.empty(0), group=collectives.group)
    assert output.numel() == 0
