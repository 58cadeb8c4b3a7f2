"""Sub-groups and device meshes: every way to make them, in any order."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_shard.errors import CollectiveMismatchError, DeadlockError
from lightning_shard.testing import run_ranks


def total(group: Any, value: float) -> float:
    summed = torch.tensor(value)
    dist.all_reduce(summed, group=group)
    return summed.item()


def test_groups_that_only_their_members_make() -> None:
    def fn(rank: int) -> list[float]:
        # torch names such a group after its ranks and how many the caller has; so the n-th each.
        mine = {0: [(0, 2), (0, 1)], 1: [(1, 3), (0, 1)], 2: [(0, 2)], 3: [(1, 3)]}[rank]
        groups = [dist.new_group(list(r), use_local_synchronization=True) for r in mine]
        return [total(group, float(rank)) for group in groups]

    assert run_ranks(fn, 4) == [[2.0, 1.0], [4.0, 1.0], [2.0], [4.0]]


def test_the_same_ranks_in_several_groups_used_in_turn() -> None:
    def fn(rank: int) -> list[float]:
        first, second = dist.new_group([0, 1, 2]), dist.new_group([2, 1, 0])
        works = []
        tensors = [torch.tensor(float(rank + 10 * k)) for k in range(4)]
        for tensor, group in zip(tensors, (first, second, second, first), strict=True):
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
        for work in reversed(works) if rank else works:
            work.wait()
        return [tensor.item() for tensor in tensors]

    assert run_ranks(fn, 3) == [[3.0, 33.0, 63.0, 93.0]] * 3


def test_subgroups_by_size_and_by_list() -> None:
    def fn(rank: int) -> tuple[float, float]:
        evenly, _ = dist.new_subgroups(2)
        listed, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        return total(evenly, rank), total(listed, rank)

    assert run_ranks(fn, 4) == [(1.0, 3.0), (1.0, 3.0), (5.0, 3.0), (5.0, 3.0)]


def test_split_group_is_refused_as_on_gloo() -> None:
    def fn(rank: int) -> str:
        try:
            dist.split_group(split_ranks=[[0, 1], [2, 3]])
        except RuntimeError as error:
            return str(error)
        return ""

    for text in run_ranks(fn, 4):
        assert "split" in str(text) or "device id" in str(text)


def test_groups_made_anew_after_they_were_destroyed() -> None:
    def fn(rank: int) -> list[float]:
        sums = []
        for _ in range(3):
            group = dist.new_group([0, 1], use_local_synchronization=True)
            sums.append(total(group, rank))
            dist.destroy_process_group(group)
        return sums

    assert run_ranks(fn, 2) == [[1.0] * 3] * 2


def test_creation_in_different_orders_is_an_error() -> None:
    def fn(rank: int) -> float:
        wanted = [[0, 1], [0, 1, 2]]
        groups = [dist.new_group(ranks) for ranks in (wanted if rank == 0 else wanted[::-1])]
        return total(groups[0], 1.0)

    with pytest.raises((CollectiveMismatchError, DeadlockError)):
        run_ranks(fn, 3)


def test_mesh_of_two_axes() -> None:
    def fn(rank: int) -> tuple[float, float, float]:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        assert list(mesh.get_coordinate() or ()) == [rank // 3, rank % 3]
        flat = mesh["dp", "tp"]._flatten()
        return (
            total(mesh.get_group("dp"), rank),
            total(mesh["tp"].get_group(), rank),
            total(flat.get_group(), rank),
        )

    rows, columns = [3.0, 12.0], [3.0, 5.0, 7.0]
    assert run_ranks(fn, 6) == [(columns[r % 3], rows[r // 3], 15.0) for r in range(6)]


def test_mesh_of_three_axes_sliced_and_flattened() -> None:
    def fn(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        both = mesh["pp", "dp"]
        flat = both._flatten("pp_dp")
        assert list(mesh["dp", "tp"].get_coordinate() or ()) == [rank // 2 % 2, rank % 2]
        meshes = [mesh["pp"], mesh["dp"], mesh["tp"], flat, both["dp"]]
        return [total(one.get_group(), 2.0**rank) for one in meshes]

    def expected(rank: int) -> list[float]:
        coordinates = [(r // 4, r // 2 % 2, r % 2) for r in range(8)]
        mine = coordinates[rank]
        free = [(0,), (1,), (2,), (0, 1), (1,)]  # the axes along which each sums
        return [
            sum(
                2.0**r
                for r, other in enumerate(coordinates)
                if all(other[a] == mine[a] for a in range(3) if a not in axes)
            )
            for axes in free
        ]

    assert run_ranks(fn, 8) == [expected(rank) for rank in range(8)]


def test_names_and_numbers_of_ranks_in_groups() -> None:
    def fn(rank: int) -> tuple[int, int, list[int], int]:
        group = dist.new_group([3, 1])
        if rank not in (1, 3):
            return dist.get_rank(group), 0, [], 0
        ranks = dist.get_process_group_ranks(group)
        return (
            dist.get_rank(group),
            dist.get_world_size(group),
            ranks,
            dist.get_global_rank(group, 0),
        )

    assert run_ranks(fn, 4) == [
        (-1, 0, [], 0),
        (0, 2, [1, 3], 1),
        (-1, 0, [], 0),
        (1, 2, [1, 3], 1),
    ]


def test_sixty_four_ranks() -> None:
    def fn(rank: int) -> tuple[float, float, int]:
        mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("dp", "tp"))
        gathered = [torch.zeros(1) for _ in range(64)]
        dist.all_gather(gathered, torch.tensor([float(rank)]))
        swapped = torch.zeros(64)
        dist.all_to_all_single(swapped, torch.full((64,), float(rank)))
        assert torch.equal(torch.cat(gathered), swapped)
        things = [None] * 64
        dist.all_gather_object(things, rank)
        assert things == list(range(64))
        return total(None, rank), total(mesh["tp"].get_group(), 1.0), dist.get_rank()

    assert run_ranks(fn, 64) == [(2016.0, 8.0, rank) for rank in range(64)]
