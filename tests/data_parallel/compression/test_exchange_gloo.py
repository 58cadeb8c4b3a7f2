"""Over Gloo the averages are those of ranks inside one process."""

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.testing import run_ranks
from tests.data_parallel.compression.buffers import SHIPPED, average, gradient, make_exchange
from tests.groups import join
from tests.processes import run_processes

NUM_STEPS = 3


def averages(rank: int, backend: str) -> dict[tuple[str, bool], Tensor]:
    """By compressor and whether each rank keeps all."""
    found = {}
    for name, compressor in SHIPPED.items():
        for keeps_all in (True, False):
            exchange = make_exchange(compressor, keeps_all=keeps_all, backend=backend)
            steps = range(NUM_STEPS)
            grads = [gradient(exchange.buffer, rank, step) for step in steps]
            found[name, keeps_all] = torch.stack([average(exchange, grad) for grad in grads])
    return found


def over_gloo() -> dict[tuple[str, bool], Tensor]:
    found = averages(join().rank, "gloo")
    dist.destroy_process_group()
    return found


def test_gloo_gives_the_averages_of_one_process() -> None:
    inside = run_ranks(lambda rank: averages(rank, "in_process"), 2)
    for got, expected in zip(run_processes(over_gloo, 2), inside, strict=True):
        assert expected is not None
        for case, value in expected.items():
            torch.testing.assert_close(got[case], value, rtol=1e-4, atol=1e-5, msg=str(case))
