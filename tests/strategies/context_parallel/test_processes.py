"""Context parallel on real processes, over Gloo and under mpirun: heads shared out, and a ring."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard import ContextParallelStrategy
from lightning_shard.context_parallel.attention import Visible, ring_attention
from lightning_shard.context_parallel.crossings import heads_and_ring
from tests.groups import all_ranks
from tests.mpirun import run_mpi
from tests.processes import run_processes
from tests.strategies.parity import (
    Case,
    Run,
    assert_bitwise_equal,
    assert_parity,
    build,
    ignore_upstream_warnings,
    ignoring,
    single_device,
    train,
)

pytestmark = ignoring()
ROWS = 6  # of each rank
LAYOUTS: dict[str, dict[str, Any]] = {
    "stage 2": {"zero_stage": 2},
    "stage 3": {"zero_stage": 3},
    "cp 2, stage 3": {"context_parallel_size": 2, "zero_stage": 3},
}


def drawn(num_ranks: int) -> list[Tensor]:
    """Return queries, keys and values of one head."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 1, ROWS * num_ranks, 4, generator=generator) for _ in range(3)]


def attend(num_ranks: int) -> list[Tensor]:
    """Return the result of causal attention, and its gradients."""
    own = [one.requires_grad_() for one in drawn(num_ranks)]
    result = torch.nn.functional.scaled_dot_product_attention(*own, is_causal=True)
    return [result.detach(), *torch.autograd.grad(result.square().sum(), own)]


def attend_in_a_ring(backend: str) -> list[Tensor]:
    """Return this rank's slice of the same."""
    group = all_ranks(backend)
    own = [
        one.chunk(group.size, 2)[group.rank].contiguous().requires_grad_()
        for one in drawn(group.size)
    ]
    visible = Visible(mask=None, is_causal=True, length=ROWS * group.size)
    result = ring_attention(*own, visible, 0.5, heads_and_ring(group, 1)[1])
    return [result.detach(), *torch.autograd.grad(result.square().sum(), own)]


def train_and_attend(backend: str, devices: int, layout: str) -> tuple[Run, list[Tensor]]:
    """Run in each rank; what a ring gives comes last, while the run's group is there."""
    ignore_upstream_warnings()
    strategy = ContextParallelStrategy(backend=backend, **LAYOUTS[layout])
    run = train(build("gpt"), strategy=strategy, devices=devices)
    return run, attend_in_a_ring(backend)


def check(of_ranks: list[tuple[Run, list[Tensor]]]) -> None:
    expected = single_device(Case(model="gpt", strategy="", num_ranks=1))
    for run, _ in of_ranks:
        assert_parity(run, expected)
        assert_bitwise_equal(run, of_ranks[0][0])
    slices = zip(*(found for _, found in of_ranks), strict=True)
    for own, full in zip(slices, attend(len(of_ranks)), strict=True):
        torch.testing.assert_close(torch.cat(own, dim=2), full, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        pytest.param(2, "stage 2"),
        pytest.param(3, "stage 3", marks=pytest.mark.slow),
        pytest.param(4, "cp 2, stage 3", marks=pytest.mark.slow),
    ],
)
def test_processes_over_gloo_train_as_a_single_device(num_ranks: int, layout: str) -> None:
    check(
        run_processes(train_and_attend, num_ranks, backend="gloo", devices=num_ranks, layout=layout)
    )


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_under_mpirun_train_as_a_single_device(num_ranks: int) -> None:
    options: dict[str, Any] = {"backend": "mpi", "devices": num_ranks, "layout": "stage 3"}
    check(run_mpi(train_and_attend, num_ranks, timeout_seconds=280, **options))
