"""Several ranks on one GPU: each may compute on a stream of its own."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.testing import run_ranks

pytestmark = pytest.mark.gpu

_CYCLES = 20_000_000  # keeps a stream busy for some milliseconds


def late(value: float) -> Tensor:
    """Return a tensor that the current stream fills only after a while."""
    tensor = torch.zeros(1000, device="cuda")
    torch.cuda._sleep(_CYCLES)
    return tensor.fill_(value)


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_results_wait_for_every_ranks_inputs(own_stream: bool, is_async: bool) -> None:
    def fn(rank: int) -> list[float]:
        stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            tensor = late(rank + 1.0)
            work = dist.all_reduce(tensor, async_op=is_async)
            if work is not None:
                work.wait()
            return [tensor.min().item(), tensor.max().item()]

    assert run_ranks(fn, 4) == [[10.0, 10.0]] * 4


@pytest.mark.parametrize("root", [0, 2])
def test_scatter_is_waited_for_by_ranks_that_give_nothing(root: int) -> None:
    def fn(rank: int) -> float:
        with torch.cuda.stream(torch.cuda.Stream()):
            parts = [late(float(r)) for r in range(3)] if rank == root else None
            output = torch.full((1000,), -1.0, device="cuda")
            dist.scatter(output, parts, src=root)
            return output.sum().item() / 1000

    assert run_ranks(fn, 3) == [0.0, 1.0, 2.0]


def test_send_and_receive_between_streams() -> None:
    def fn(rank: int) -> float:
        with torch.cuda.stream(torch.cuda.Stream()):
            if rank == 0:
                dist.send(late(3.0), 1)
                return 3.0
            got = torch.zeros(1000, device="cuda")
            dist.recv(got, 0)
            return got.sum().item() / 1000

    assert run_ranks(fn, 2) == [3.0, 3.0]


def test_each_rank_has_its_own_random_stream_on_the_gpu() -> None:
    def fn(rank: int) -> tuple[float, float]:
        first = torch.rand((), device="cuda").item()
        dist.barrier()
        return first, torch.rand((), device="cuda").item()

    drawn = run_ranks(fn, 3, seed=5)
    assert drawn == run_ranks(fn, 3, seed=5)
    for rank, numbers in enumerate(drawn):
        torch.cuda.manual_seed(5 + rank)
        assert numbers == tuple(torch.rand((), device="cuda").item() for _ in range(2))


def test_ddp_of_several_ranks_on_one_gpu() -> None:
    def fn(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).cuda())
        model(torch.full((2, 4), float(rank), device="cuda")).square().mean().backward()
        return model.module.weight.grad.cpu()

    torch.manual_seed(0)
    alone = nn.Linear(4, 4)
    for rank in range(3):
        (alone(torch.full((2, 4), float(rank))).square().mean() / 3).backward()
    for gradient in run_ranks(fn, 3):
        torch.testing.assert_close(gradient, alone.weight.grad)
