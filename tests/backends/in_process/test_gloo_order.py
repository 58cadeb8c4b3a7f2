"""In-process ranks add up in the order of Gloo's ring, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_shard.backends.in_process import like_gloo
from lightning_shard.testing import run_ranks
from tests.processes import run_processes

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
