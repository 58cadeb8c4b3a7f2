"""Groups of some of the ranks, meshes, and what torch builds on them.

The checks of this file make groups out of the default group's ranks.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_shard.backends.collectives import Collectives
from tests.backends.conformance.suite import check
from tests.backends.conformance.tensors import assert_same


def device_type() -> str:
    """Return the type of this rank's device."""
    return torch.get_default_device().type


def sum_of_ranks(group: dist.ProcessGroup) -> float:
    """Sum the world's ranks over a group."""
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


@check
def every_pair_of_ranks_as_a_group(collectives: Collectives) -> None:
    size = collectives.size
    pairs = [[low, high] for low in range(size) for high in range(low + 1, size)]
    groups = [dist.new_group(pair) for pair in pairs]
    for pair, group in zip(pairs, groups, strict=True):
        if collectives.rank in pair:
            assert dist.get_process_group_ranks(group) == pair
            assert dist.get_group_rank(group, collectives.rank) == pair.index(collectives.rank)
            assert sum_of_ranks(group) == sum(pair)


@check
def groups_made_by_their_members_alone(collectives: Collectives) -> None:
    half = collectives.size // 2
    low, high = list(range(half)), list(range(half, collectives.size))
    mine = low if collectives.rank < half else high
    for _ in range(2):
        group = dist.new_group(mine, use_local_synchronization=True)
        assert sum_of_ranks(group) == sum(mine)


@check
def groups_used_in_another_order_than_made(collectives: Collectives) -> None:
    dp = list(range(collectives.size))
    groups = [dist.new_group(dp) for _ in range(3)]
    tensors = [torch.full((4,), float(number)) for number in range(3)]
    # Groups do not order each other: ranks may begin and end them in orders of their own.
    order = [(collectives.rank + step) % 3 for step in range(3)]
    works = {
        number: dist.all_reduce(tensors[number], group=groups[number], async_op=True)
        for number in order
    }
    for number in reversed(order):
        works[number].wait()
    for number, tensor in enumerate(tensors):
        assert_same(tensor, torch.full((4,), float(number * collectives.size)))


@check
def a_group_of_reversed_ranks(collectives: Collectives) -> None:
    backwards = list(reversed(range(collectives.size)))
    group = dist.new_group(backwards)
    ranks = dist.get_process_group_ranks(group)
    assert sorted(ranks) == sorted(backwards)
    root = ranks[0]
    tensor = torch.tensor([float(collectives.rank)])
    dist.broadcast(tensor, src=root, group=group)
    assert tensor.item() == root


@check
def a_destroyed_group_leaves_the_others(collectives: Collectives) -> None:
    ranks = list(range(collectives.size))
    first, second = dist.new_group(ranks), dist.new_group(ranks)
    assert sum_of_ranks(first) == sum(ranks)
    dist.destroy_process_group(first)
    assert sum_of_ranks(second) == sum(ranks)
    assert sum_of_ranks(collectives.group) == sum(ranks)


@check
def messages_count_ranks_of_the_world_or_of_the_group(collectives: Collectives) -> None:
    members = list(range(1, collectives.size)) or [0]
    group = dist.new_group(members)
    if collectives.rank not in members or len(members) < 2:
        return
    last = members[-1]
    if collectives.rank == 1:
        dist.send(torch.tensor([7.0]), dst=last, group=group)
        dist.send(torch.tensor([8.0]), group_dst=len(members) - 1, group=group)
    elif collectives.rank == last:
        for number, source in ((7.0, {"src": 1}), (8.0, {"group_src": 0})):
            received = torch.zeros(1)
            dist.recv(received, group=group, **source)
            assert received.item() == number


@check
def a_mesh_of_one_axis(collectives: Collectives) -> None:
    mesh = init_device_mesh(device_type(), (collectives.size,), mesh_dim_names=("dp",))
    assert mesh.get_local_rank("dp") == collectives.rank
    assert sum_of_ranks(mesh.get_group("dp")) == sum(range(collectives.size))


@check
def a_mesh_of_two_axes(collectives: Collectives) -> None:
    columns = 2 if collectives.size % 2 == 0 else collectives.size
    shape = (collectives.size // columns, columns)
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=("dp", "tp"))
    row, column = divmod(collectives.rank, columns)
    assert (mesh.get_local_rank("dp"), mesh.get_local_rank("tp")) == (row, column)
    numbers = torch.arange(collectives.size, device="cpu").view(shape)
    assert sum_of_ranks(mesh.get_group("dp")) == numbers[:, column].sum()
    assert sum_of_ranks(mesh.get_group("tp")) == numbers[row].sum()


@check
def a_mesh_flattened(collectives: Collectives) -> None:
    shape = (collectives.size, 1)
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=("dp", "tp"))
    flat: DeviceMesh = mesh["dp", "tp"]._flatten("all")
    assert sum_of_ranks(flat.get_group()) == sum(range(collectives.size))
