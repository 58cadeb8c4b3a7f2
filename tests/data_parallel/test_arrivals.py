"""Gradients that wait in a buffer are taken once, with all that autograd has added to them."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.testing import run_ranks
from tests.groups import all_ranks

NUM_RANKS = 2


def passed(model: nn.ModuleList, x: Tensor) -> Tensor:
    """Pass a layer twice, each time in a backward of its own within the backward."""
    first, twice, last = model
    x = first(x)
    for layer in (twice, twice):
        x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
    return last(x).square().mean()


def made() -> nn.ModuleList:
    torch.manual_seed(7)
    return nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).double()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank)).double()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_comes_twice_while_it_waits_is_their_sum(stage: int) -> None:
    """Once the order was learnt, a layer called twice under reentrant checkpoints raised."""

    def on_ranks(rank: int) -> list[Tensor]:
        model, ranks = made(), all_ranks()
        engine, found = DataParallelEngine(model, ranks, EngineOptions(stage=stage)), []
        for step in range(3):
            with engine.step():
                loss = passed(model, batch(rank, step))
            with engine.backward():
                loss.backward()
            found += [param.grad.norm().detach() for param in model.parameters()]
            model.zero_grad()
        engine.detach(restore=True)
        return found

    model, expected = made(), []
    for step in range(3):
        torch.stack(
            [passed(model, batch(rank, step)) for rank in range(NUM_RANKS)]
        ).mean().backward()
        expected += [param.grad.norm() for param in model.parameters()]
        model.zero_grad()
    for got in run_ranks(on_ranks, NUM_RANKS):
        torch.testing.assert_close(got, expected)
