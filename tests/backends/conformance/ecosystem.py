"""What torch builds on a process group: functional collectives, DTensor, DDP, FSDP2."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_shard.backends.collectives import Collectives
from tests.backends.conformance.groups import device_type
from tests.backends.conformance.suite import check, check_each
from tests.backends.conformance.tensors import (
    all_values,
    assert_same,
    own_slice,
    sum_of_values,
    values,
)

if hasattr(funcol, "all_gather_single"):  # torch 2.13's names; the older ones warn there
    functional_gather = funcol.all_gather_single
    functional_gather_with_gradient = funcol.all_gather_single_autograd
    functional_scatter = funcol.reduce_scatter_single
else:
    functional_gather = funcol.all_gather_tensor
    functional_gather_with_gradient = funcol.all_gather_tensor_autograd
    functional_scatter = funcol.reduce_scatter_tensor


@check
def functional_all_reduce(collectives: Collectives) -> None:
    source = values(collectives.rank, 6)
    result = funcol.wait_tensor(funcol.all_reduce(source, "sum", collectives.group))
    assert_same(result, sum_of_values(collectives.size, 6))
    assert_same(source, values(collectives.rank, 6))


@check
def functional_all_reduce_coalesced(collectives: Collectives) -> None:
    sources = [values(collectives.rank, numel) for numel in (3, 5)]
    results = funcol.all_reduce_coalesced(sources, "sum", collectives.group)
    for result, numel in zip(results, (3, 5), strict=True):
        assert_same(funcol.wait_tensor(result), sum_of_values(collectives.size, numel))


@check
def functional_all_gather(collectives: Collectives) -> None:
    source = values(collectives.rank, 6).view(3, 2)
    parts = list(all_values(collectives.size, 6).view(-1, 3, 2))
    for dim in (0, 1):
        result = functional_gather(source, dim, collectives.group)
        assert_same(funcol.wait_tensor(result), torch.cat(parts, dim))


@check
def functional_reduce_scatter(collectives: Collectives) -> None:
    size = collectives.size
    source = values(collectives.rank, 4 * size).view(2 * size, 2)
    total = sum_of_values(size, 4 * size).view(2 * size, 2)
    result = functional_scatter(source, "sum", 0, collectives.group)
    assert_same(funcol.wait_tensor(result), total.chunk(size)[collectives.rank])
    result = functional_scatter(source.t(), "sum", 1, collectives.group)
    assert_same(funcol.wait_tensor(result), total.t().chunk(size, 1)[collectives.rank])


@check
def functional_all_to_all(collectives: Collectives) -> None:
    size, rank = collectives.size, collectives.rank
    source = torch.full((sum(range(size)),), float(rank))
    given = list(range(size))
    result = funcol.all_to_all_single(source, [rank] * size, given, collectives.group)
    expected = [float(peer) for peer in range(size) for _ in range(rank)]
    assert funcol.wait_tensor(result).tolist() == expected


@check
def functional_broadcast(collectives: Collectives) -> None:
    result = funcol.broadcast(values(collectives.rank, 4), 0, collectives.group)
    assert_same(funcol.wait_tensor(result), values(0, 4))


@check
def functional_gather_and_its_gradient(collectives: Collectives) -> None:
    source = values(collectives.rank, 3).requires_grad_()
    gathered = functional_gather_with_gradient(source, 0, collectives.group)
    (funcol.wait_tensor(gathered) * torch.arange(3.0 * collectives.size)).sum().backward()
    weights = own_slice(collectives, torch.arange(3.0 * collectives.size))
    assert_same(source.grad, weights * collectives.size)


PLACEMENTS = {
    "rows_to_columns": (Shard(0), Shard(1)),
    "rows_to_everywhere": (Shard(0), Replicate()),
    "columns_to_everywhere": (Shard(1), Replicate()),
    "everywhere_to_rows": (Replicate(), Shard(0)),
}


@check_each(PLACEMENTS)
def dtensor(collectives: Collectives, name: str) -> None:
    mesh = init_device_mesh(device_type(), (collectives.size,))
    before, after = PLACEMENTS[name]
    full = torch.arange(5.0 * 7).view(5, 7)  # rows and columns that no group divides evenly
    tensor = distribute_tensor(full, mesh, [before]).redistribute(mesh, [after])
    assert tensor.placements == (after,)
    assert_same(tensor.full_tensor(), full)


@check
def dtensor_partial_sums(collectives: Collectives) -> None:
    mesh = init_device_mesh(device_type(), (collectives.size,))
    part = values(collectives.rank, 12).view(4, 3)
    total = sum_of_values(collectives.size, 12).view(4, 3)
    tensor = DTensor.from_local(part, mesh, [Partial()], run_check=False)
    assert_same(tensor.redistribute(mesh, [Replicate()]).to_local(), total)
    assert_same(tensor.redistribute(mesh, [Shard(0)]).full_tensor(), total)


@check
def dtensor_product_and_gradient(collectives: Collectives) -> None:
    mesh = init_device_mesh(device_type(), (collectives.size,))
    weight, data = torch.arange(12.0).view(4, 3), torch.arange(8.0).view(2, 4)
    sharded = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    product = distribute_tensor(data, mesh, [Shard(1)]) @ sharded
    assert_same(product.full_tensor(), data @ weight)
    product.redistribute(mesh, [Replicate()]).to_local().sum().backward()
    assert_same(sharded.grad.full_tensor(), data.sum(0)[:, None].expand(4, 3))


@check
def ddp_averages_gradients(collectives: Collectives) -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    parallel = DistributedDataParallel(model, process_group=collectives.group)
    parallel(torch.full((1, 3), float(collectives.rank))).sum().backward()
    assert_same(model.weight.grad, torch.full((1, 3), (collectives.size - 1) / 2))


@check
def fsdp2_averages_gradients(collectives: Collectives) -> None:
    mesh = init_device_mesh(device_type(), (collectives.size,))
    model = torch.nn.Linear(3, 5, bias=False)
    torch.nn.init.ones_(model.weight)
    fully_shard(model, mesh=mesh)
    model(torch.full((1, 3), float(collectives.rank))).sum().backward()
    expected = torch.full((5, 3), (collectives.size - 1) / 2)
    assert_same(model.weight.grad.full_tensor(), expected)
    dist.barrier(group=collectives.group)
