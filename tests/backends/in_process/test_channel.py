"""Tensors that share storage, with another rank's, too; sums have the order of Gloo's ring."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_shard.backends.in_process.channel import like_gloo
from lightning_shard.testing import run_ranks
from tests.processes import run_processes

# torch 2.13 renamed these, torch 2.11 has the old names only.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def test_all_gather_from_a_slice_of_its_output() -> None:
    def fn(rank: int) -> list[float]:
        full = torch.full((6,), -1.0)
        mine = full[2 * rank : 2 * rank + 2]
        mine.fill_(rank)
        all_gather_single(full, mine)
        return full.tolist()

    assert run_ranks(fn, 3) == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]] * 3


def test_all_gather_from_another_slice_of_its_output() -> None:
    def fn(rank: int) -> tuple[list[float], list[float]]:
        full, listed = torch.arange(3.0) + 10 * rank, torch.arange(3.0) + 10 * rank
        all_gather_single(full, full[:1])
        dist.all_gather(list(listed.split(1)), listed[:1])
        return full.tolist(), listed.tolist()

    assert run_ranks(fn, 3) == [([0.0, 10.0, 20.0],) * 2] * 3


def test_reduce_scatter_into_a_slice_of_its_input() -> None:
    def fn(rank: int) -> list[float]:
        full = torch.arange(4.0)
        reduce_scatter_single(full[2 * rank : 2 * rank + 2], full)
        wrong_slice = torch.arange(4.0)
        reduce_scatter_single(wrong_slice[:2], wrong_slice)
        return full.tolist() + wrong_slice[:2].tolist()

    assert run_ranks(fn, 2) == [[0.0, 2.0, 2.0, 3.0, 0.0, 2.0], [0.0, 1.0, 4.0, 6.0, 4.0, 6.0]]


def test_all_to_all_in_place() -> None:
    def fn(rank: int) -> list[float]:
        tensor = torch.arange(2.0) + 10 * rank
        dist.all_to_all_single(tensor, tensor)
        return tensor.tolist()

    assert run_ranks(fn, 2) == [[0.0, 10.0], [1.0, 11.0]]


def test_ranks_that_share_one_tensor() -> None:
    shared = torch.ones(2)

    def fn(rank: int) -> list[float]:
        dist.all_reduce(shared)
        dist.barrier()
        return shared.tolist()

    assert run_ranks(fn, 2) == [[2.0, 2.0]] * 2


NUMELS = (1, 7, 1_000, 40_001, 300_001, 3_000_017)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _part(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1_000 * rank + numel % 997)
    return torch.randn(numel, generator=generator).to(dtype)


def _sums(rank: int) -> list[Tensor]:
    torch.set_num_threads(1)
    found = []
    for dtype in DTYPES:
        for numel in NUMELS:
            found.append(_part(rank, numel, dtype))
            dist.all_reduce(found[-1])
    for op in (ReduceOp.MAX, ReduceOp.PRODUCT):
        found.append(_part(rank, 1_000, torch.float32))
        dist.all_reduce(found[-1], op=op)
    return found


def _over_gloo() -> list[Tensor]:
    dist.init_process_group("gloo")
    try:
        return _sums(dist.get_rank())
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [4, pytest.param(3, marks=pytest.mark.slow)])
def test_all_reduces_have_the_bits_of_gloo(num_ranks: int) -> None:
    expected = run_processes(_over_gloo, num_ranks)[0]
    with like_gloo():
        got = run_ranks(_sums, num_ranks)[0]
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    in_rank_order = run_ranks(_sums, num_ranks)[0]
    same = [torch.equal(*pair) for pair in zip(in_rank_order, expected, strict=True)]
    assert not all(same)  # else this would show nothing
