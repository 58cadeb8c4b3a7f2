"""What torch builds on groups runs on in-process ones: DDP, FSDP2, DTensor, functional."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_shard.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def batch(rank: int) -> Tensor:
    return torch.arange(8.0).view(2, 4) / 8 + rank


def single_device_weights(num_ranks: int) -> list[Tensor]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        sum(model(batch(r)).square().mean() for r in range(num_ranks)).div(num_ranks).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(model: nn.Module, parameters: list[nn.Parameter], rank: int) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch(rank)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("find_unused", [False, True])
def test_ddp(num_ranks: int, find_unused: bool) -> None:
    def fn(rank: int) -> list[Tensor]:
        model = nn.parallel.DistributedDataParallel(
            make_model(), bucket_cap_mb=1, find_unused_parameters=find_unused
        )
        train(model, list(model.parameters()), rank)
        return [parameter.detach() for parameter in model.parameters()]

    for weights in run_ranks(fn, num_ranks):
        torch.testing.assert_close(weights, single_device_weights(num_ranks))


def test_ddp_with_a_communication_hook() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    def fn(rank: int) -> list[Tensor]:
        model = nn.parallel.DistributedDataParallel(make_model())
        model.register_comm_hook(None, fp16_compress_hook)
        train(model, list(model.parameters()), rank)
        return [parameter.detach() for parameter in model.parameters()]

    for weights in run_ranks(fn, 2):
        torch.testing.assert_close(weights, single_device_weights(2), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_fsdp2(num_ranks: int) -> None:
    def fn(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (num_ranks,))
        model = make_model()
        for part in (model[0], model[2], model):  # type: ignore[index]
            fully_shard(part, mesh=mesh)
        train(model, list(model.parameters()), rank)
        return [parameter.full_tensor().detach() for parameter in model.parameters()]

    for weights in run_ranks(fn, num_ranks):
        torch.testing.assert_close(weights, single_device_weights(num_ranks))


def test_dtensor_on_a_mesh_of_two_axes() -> None:
    full = torch.arange(16.0).view(4, 4)

    def fn(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        left = distribute_tensor(full, mesh, [Shard(0), Replicate()])
        right = distribute_tensor(full, mesh, [Replicate(), Shard(1)])
        product = left @ right
        assert isinstance(product, DTensor)
        assert product.to_local().shape == (2, 2)
        reduced = product.sum()
        torch.testing.assert_close(reduced.full_tensor(), (full @ full).sum())
        return product.full_tensor()

    for product in run_ranks(fn, 4):
        torch.testing.assert_close(product, full @ full)


def test_functional_collectives() -> None:
    def fn(rank: int) -> None:
        group = dist.group.WORLD
        mine = torch.full((2,), float(rank))
        total = functional.all_reduce(mine, "sum", group)
        gathered = functional.all_gather_tensor(mine, 0, group)
        part = functional.reduce_scatter_tensor(torch.ones(6), "sum", 0, group)
        swapped = functional.all_to_all_single(torch.arange(3.0), None, None, group)
        assert (total + 0).tolist() == [3.0, 3.0]
        assert (gathered + 0).tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        assert (part + 0).tolist() == [3.0, 3.0]
        assert (swapped + 0).tolist() == [float(rank)] * 3

    run_ranks(fn, 3)


def test_collectives_with_gradients() -> None:
    from torch.distributed.nn.functional import all_gather

    def fn(rank: int) -> list[float]:
        weight = torch.full((2,), float(rank), requires_grad=True)
        torch.stack(all_gather(weight)).sum().backward()
        assert weight.grad is not None
        return list(weight.grad.tolist())

    assert run_ranks(fn, 3) == [[3.0, 3.0]] * 3


def test_a_group_can_be_deep_copied_as_part_of_something() -> None:
    def fn(rank: int) -> bool:
        group = dist.group.WORLD
        return copy.deepcopy({"group": group})["group"] is group

    assert run_ranks(fn, 2) == [True, True]
