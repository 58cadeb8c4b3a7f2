"""Adam's steps under a frozen second moment, on momentum or gradients: the rule of 1-bit Adam."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from lightning_shard.checkpoint.optimizer_state import full_state_dict
from lightning_shard.data_parallel.compression import Compressor, PowerSGD, TopK
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.errors import ConfigError
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks
from tests.data_parallel.compression.buffers import Exact
from tests.groups import engine_of
from tests.optim.test_sharded_optimizer import make_model

WARMUP, NUM_STEPS, LR, DECAY, EPS = 3, 7, 0.05, 0.1, 1e-8
BETAS = (0.8, 0.95)


class ExactMomentum(Exact):
    """What `OneBit` does without its loss."""

    sends_momentum = True

    def is_dense(self, step: int) -> bool:
        return step < WARMUP


# Its matrices here are too small to be approximated: all of a gradient arrives.
COMPRESSORS: dict[str, Compressor] = {
    "momentum": ExactMomentum(),
    "gradients": PowerSGD(rank=64, warmup_steps=WARMUP, adam=True),
}
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": lambda p: optim.AdamW(p, lr=LR, betas=BETAS, weight_decay=DECAY, eps=EPS),
    "AdamW fused": lambda p: optim.AdamW(
        p, lr=LR, betas=BETAS, weight_decay=DECAY, eps=EPS, fused=True
    ),
    "Adam": lambda p: optim.Adam(p, lr=LR, betas=BETAS, weight_decay=DECAY, eps=EPS),
}


def inputs(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 3, generator=generator)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    return (model(inputs(step, rank)) - 1.0).square().mean()


def make_engine(model: nn.Module, stage: int, compression: Compressor) -> DataParallelEngine:
    return engine_of(model, stage=stage, compression=compression)


def take_step(
    model: nn.Module, engine: DataParallelEngine, optimizer: Optimizer, step: int, rank: int
) -> None:
    optimizer.zero_grad()
    with engine.step():
        loss = loss_of(model, step, rank)
    with engine.backward():
        loss.backward()
    optimizer.step()


def reference(name: str, num_ranks: int, *, gradients: bool) -> list[Tensor]:
    """One device, step by step as the paper's algorithm has it.

    Adam's decay is part of its momentum where gradients travel; else it is added to what came.
    """
    coupled, late = (DECAY, 0.0) if gradients else (0.0, DECAY)
    if name != "Adam":
        coupled = late = 0.0
    model = make_model()
    params = list(model.parameters())
    optimizer = OPTIMIZERS[name](params)
    momenta = [torch.zeros_like(param) for param in params]
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        sum(loss_of(model, step, rank) for rank in range(num_ranks)).div(num_ranks).backward()
        for momentum, param in zip(momenta, params, strict=True):
            slope = param.grad + coupled * param.detach()
            momentum.mul_(BETAS[0]).add_(slope, alpha=1 - BETAS[0])
        if step < WARMUP:
            optimizer.step()
            continue
        with torch.no_grad():
            for momentum, param in zip(momenta, params, strict=True):
                variance = optimizer.state[param]["exp_avg_sq"] / (1 - BETAS[1] ** WARMUP)
                slope = momentum + late * param
                if name != "Adam":
                    param.mul_(1 - LR * DECAY)
                param -= LR * (slope / (variance.sqrt() + EPS)).clamp(-1, 1)
    return [param.detach() for param in params]


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("travels", COMPRESSORS)
def test_momentum_moves_parameters_and_the_second_moment_stays(
    travels: str, name: str, stage: int
) -> None:
    def fn(rank: int) -> tuple[list[Tensor], dict[str, Any]]:
        model = make_model()
        engine = make_engine(model, stage, COMPRESSORS[travels])
        optimizer = OPTIMIZERS[name](model.parameters())
        ShardedOptimizer(optimizer, engine)
        for step in range(NUM_STEPS):
            if step == WARMUP:
                frozen = full_state_dict(optimizer, engine)
            take_step(model, engine, optimizer, step, rank)
        final = full_state_dict(optimizer, engine)
        for index, entries in final.get("state", {}).items():
            before = frozen["state"][index]
            assert torch.equal(entries["exp_avg_sq"], before["exp_avg_sq"])
            assert entries["step"] == WARMUP
            assert not torch.equal(entries["exp_avg"], before["exp_avg"])
        return [param.detach().clone() for param in model.parameters()], final

    expected = reference(name, 2, gradients=travels == "gradients")
    for result in run_ranks(fn, 2):
        assert result is not None
        for got, exact in zip(result[0], expected, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-6)


def wide_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 48), nn.Tanh(), nn.Linear(48, 48), nn.Linear(48, 1))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_stages_take_the_same_steps_on_what_is_left_of_a_gradient(num_ranks: int) -> None:
    """Of 48 x 48 a rank of 2 loses most; what the stages hold of Adam differs, its steps do not."""

    def fn(rank: int) -> list[list[Tensor]]:
        weights = []
        for stage in range(3):
            model = wide_model()
            settings = PowerSGD(2, warmup_steps=WARMUP, factor_dtype="bfloat16", adam=True)
            engine = make_engine(model, stage, settings)
            optimizer = OPTIMIZERS["AdamW"](model.parameters())
            ShardedOptimizer(optimizer, engine)
            for step in range(NUM_STEPS):
                take_step(model, engine, optimizer, step, rank)
            weights.append([param.detach().clone() for param in model.parameters()])
        return weights

    for result in run_ranks(fn, num_ranks):
        assert result is not None
        for stage in (1, 2):
            torch.testing.assert_close(result[stage], result[0], rtol=1e-5, atol=1e-6)


def test_what_is_first_used_later_has_a_warm_up_of_its_own() -> None:
    """Where gradients travel, Adam's own steps go on until it has seen a warm-up's worth."""

    def fn(rank: int) -> None:
        early, late = nn.Linear(3, 1), nn.Linear(3, 1)
        engine = make_engine(nn.ModuleList([early, late]), 0, COMPRESSORS["gradients"])
        optimizer = optim.Adam([*early.parameters(), *late.parameters()], lr=LR)
        ShardedOptimizer(optimizer, engine)
        counts = []
        for step in range(2 * WARMUP + 2):
            optimizer.zero_grad()
            with engine.step():
                loss = loss_of(early, step, rank)
                loss = loss + loss_of(late, step, rank) if step > WARMUP else loss
            with engine.backward():
                loss.backward()
            optimizer.step()
            counts.append(int(optimizer.state[late.weight].get("step", 0)))
            assert optimizer.state[early.weight]["step"] == min(step + 1, WARMUP)
        assert counts == [0, 0, 0, 0, 1, 2, 3, 3]

    run_ranks(fn, 2)


def test_a_value_that_never_had_a_gradient_stays() -> None:
    """Decoded signs are never zero: divided by a second moment of zero they would be huge."""

    class Ones(ExactMomentum):
        def decode(self, fields: Sequence[Tensor], numel: int) -> Tensor:
            return torch.ones(numel)

    def fn(rank: int) -> None:
        model = nn.Embedding(8, 4)
        with torch.no_grad():
            model.weight.fill_(0.5)
        engine = make_engine(model, 0, Ones())
        optimizer = optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        ShardedOptimizer(optimizer, engine)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            with engine.step():
                loss = model(torch.tensor([1, 2])).square().sum()
            with engine.backward():
                loss.backward()
            optimizer.step()
        assert (model.weight[3:] == 0.5).all()
        assert (model.weight[1:3] != 0.5).all()
        assert (model.weight - 0.5).abs().max() <= NUM_STEPS * LR * 1.01

    run_ranks(fn, 2)


@pytest.mark.parametrize(
    ("make", "compression", "message"),
    [
        (lambda p: optim.SGD(p, lr=0.1), ExactMomentum(), "Adam's momentum, which SGD"),
        (lambda p: optim.SGD(p, lr=0.1), COMPRESSORS["gradients"], "Adam's momentum, which SGD"),
        (lambda p: optim.AdamW(p, amsgrad=True), ExactMomentum(), "amsgrad=True"),
        (lambda p: optim.Adam(p, maximize=True), ExactMomentum(), "maximize=True"),
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), TopK(momentum=0.5), "count twice"),
        (lambda p: optim.RMSprop(p, momentum=0.9), TopK(momentum=0.5), "momentum of 0.9"),
        (optim.AdamW, TopK(momentum=0.5), "AdamW has a momentum of 0.9"),
    ],
)
def test_an_optimizer_that_cannot_use_momentum_is_refused(
    make: Callable[..., Optimizer], compression: Compressor, message: str
) -> None:
    def fn(rank: int) -> None:
        model = make_model()
        engine = make_engine(model, 0, compression)
        ShardedOptimizer(make(model.parameters()), engine)

    with pytest.raises(ConfigError, match=message):
        run_ranks(fn, 1)
