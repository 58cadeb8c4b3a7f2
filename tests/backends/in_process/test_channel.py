"""Tensors that share storage, with themselves or with another rank's."""

import torch
import torch.distributed as dist

from lightning_shard.testing import run_ranks

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
