"""Against torch.nn.utils, whatever the stage and wherever the shards lie."""

import math

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.optim.clipping import clip_grad_norm, clip_grad_value, global_grad_norm
from lightning_shard.testing import run_ranks
from tests.groups import engine_of

NORMS = [1.0, 2.0, 3.0, math.inf]


class Mixed(nn.Module):
    """Several formats, a scalar, and one parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 5)
        self.factor = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.turn = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x) * self.turn * self.turn
        return ((out.real - out.imag).double() * self.factor).square().mean()


def make(stage: int) -> tuple[nn.Module, DataParallelEngine]:
    model = Mixed()
    engine = engine_of(model, stage=stage)
    with engine.step():
        loss = model(torch.ones(1, 3))
    with engine.backward():
        loss.backward()
    return model, engine


def alone() -> nn.Module:
    model = Mixed()
    model(torch.ones(1, 3)).backward()
    return model


def local_grads(model: nn.Module, engine: DataParallelEngine) -> list[Tensor]:
    with engine.optimizer_view():
        return [p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_norm(norm_type: float, stage: int, num_ranks: int) -> None:
    grads = [p.grad for p in alone().parameters() if p.grad is not None]
    expected = nn.utils.get_total_norm(grads, norm_type).item()

    def fn(rank: int) -> float:
        model, engine = make(stage)
        return global_grad_norm(list(model.parameters()), engine, norm_type).item()

    assert run_ranks(fn, num_ranks) == pytest.approx([expected] * num_ranks, rel=1e-5)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_clip_by_norm(stage: int, max_norm: float) -> None:
    model = alone()
    expected = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    largest = max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)

    def fn(rank: int) -> tuple[float, float]:
        model, engine = make(stage)
        norm = clip_grad_norm(list(model.parameters()), max_norm, engine)
        grads = local_grads(model, engine)
        return norm.item(), max((g.abs().max().item() for g in grads if g.numel()), default=0.0)

    results = [result for result in run_ranks(fn, 2) if result is not None]
    assert [norm for norm, _ in results] == pytest.approx([expected.item()] * 2, rel=1e-5)
    assert max(most for _, most in results) == pytest.approx(largest, rel=1e-5)


@pytest.mark.parametrize("stage", range(4))
def test_no_gradients_at_all(stage: int) -> None:
    def fn(rank: int) -> float:
        model = nn.Linear(2, 2)
        engine = engine_of(model, stage=stage)
        return clip_grad_norm(list(model.parameters()), 1.0, engine).item()

    assert run_ranks(fn, 2) == [0.0, 0.0]


@pytest.mark.parametrize("stage", range(4))
def test_clip_by_value(stage: int) -> None:
    def fn(rank: int) -> tuple[float, float]:
        model = nn.Linear(3, 5)
        engine = engine_of(model, stage=stage)
        with engine.step():
            loss = model(torch.ones(1, 3)).sum()
        with engine.backward():
            loss.backward()
        clip_grad_value(list(model.parameters()), 0.25, engine)
        grads = torch.cat(local_grads(model, engine))
        return grads.min().item(), grads.max().item()

    assert run_ranks(fn, 2) == [(0.25, 0.25)] * 2
