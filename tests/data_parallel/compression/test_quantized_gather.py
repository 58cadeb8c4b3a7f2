"""Parameters gathered in 8 bits: equal on all ranks, made of exact shards, never added up."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.data_parallel.compression.built_in import Int8
from lightning_shard.data_parallel.compression.compressor import Turn
from lightning_shard.data_parallel.compression.quantized_gather import BLOCK
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.errors import ConfigError
from lightning_shard.testing import run_ranks
from tests.data_parallel.one_step import forward_and_backward
from tests.groups import engine_of

_RANKS, _STEPS, _RATE = 2, 6, 0.05


class Blocks(nn.Module):
    """Two blocks, and layers outside of them, of sizes that no block of values divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(12, 24)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.last = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x).square().mean()


def rounded(values: Tensor) -> Tensor:
    """Return values as they arrive: a parameter's blocks begin with it."""
    codec, flat = Int8(block=BLOCK, rounding="nearest"), values.detach().flatten()
    return codec.decode(codec.encode(flat, Turn(0, 0)), flat.numel()).view(values.shape)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * step + rank))


def step_of(engine: DataParallelEngine, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """Take one step of an optimizer that was given the engine's parameters."""
    loss = forward_and_backward(engine, lambda: engine.model(x))
    params = [*engine.model.parameters()]
    with engine.optimizer_view():
        engine.begin_update(params)
        optimizer.step()
        optimizer.zero_grad()
    engine.publish(params)
    return loss


def masters(engine: DataParallelEngine) -> dict[str, Tensor]:
    names = {param: name for name, param in engine.model.named_parameters()}
    every = engine.full_values.each(everywhere=True)
    return {names[param]: value.detach().clone() for param, value in every}


def reference() -> tuple[dict[str, Tensor], list[float]]:
    """Train on one device with rounded parameters, whose gradients update exact ones."""
    exact, losses = Blocks(), []
    adam = torch.optim.Adam(exact.parameters(), _RATE)
    for step in range(_STEPS):
        used = deepcopy(exact)
        for param in used.parameters():
            param.data = rounded(param)
        loss = sum((used(batch(step, rank)) for rank in range(_RANKS)), torch.zeros(())) / _RANKS
        loss.backward()
        for param, seen in zip(exact.parameters(), used.parameters(), strict=True):
            param.grad = seen.grad
        adam.step()
        losses.append(float(loss.detach()))
    return dict(exact.named_parameters()), losses


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_steps_are_those_of_exact_parameters_that_are_rounded_where_they_are_used(
    stage: int,
) -> None:
    def fn(rank: int) -> tuple[dict[str, Tensor], list[float]]:
        engine = engine_of(Blocks(), stage=stage, bucket_mb=1e-9, quantized_gathers="int8")
        adam = torch.optim.Adam(engine.model.parameters(), _RATE)
        losses = [float(step_of(engine, adam, batch(step, rank))) for step in range(_STEPS)]
        return masters(engine), losses

    found = run_ranks(fn, _RANKS)
    expected, losses = reference()
    means = torch.tensor([one[1] for one in found if one]).mean(0)
    torch.testing.assert_close(means, torch.tensor(losses), rtol=2e-5, atol=1e-6)
    for one in found:
        assert one is not None
        for name, value in expected.items():
            torch.testing.assert_close(one[0][name], value.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_compute_with_the_same_values_within_half_a_step_of_the_masters(stage: int) -> None:
    def fn(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model, seen = Blocks(), {}
        engine = engine_of(model, stage=stage, bucket_mb=1e-9, quantized_gathers="int8")
        adam = torch.optim.Adam(model.parameters(), _RATE)
        for step in range(2):
            step_of(engine, adam, batch(step, rank))

        def note(name: str) -> Callable[..., None]:
            def noted(module: nn.Module, *_: object) -> None:
                seen[f"{name}.weight"] = module.weight.detach().clone()

            return noted

        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(note(name))
        with engine.step(), torch.no_grad():
            model(batch(2, rank))
        return masters(engine), seen

    (exact, first), (same, second) = (one or ({}, {}) for one in run_ranks(fn, _RANKS))
    assert len(first) == 4
    for name, values in first.items():
        assert torch.equal(values, second[name])
        assert torch.equal(exact[name], same[name])
        assert torch.equal(values, rounded(exact[name]))
        assert not torch.equal(values, exact[name])
        step = exact[name].abs().max() / 127
        assert (values - exact[name]).abs().max() <= 0.5001 * step


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_nobody_updates_stays_exact_however_often_it_is_gathered(stage: int) -> None:
    def fn(rank: int) -> dict[str, Tensor]:
        model = Blocks()
        engine = engine_of(model, stage=stage, bucket_mb=1e-9, quantized_gathers="int8")
        nothing = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(3):
            step_of(engine, nothing, batch(step, rank))
        return masters(engine)

    for found in run_ranks(fn, _RANKS):
        assert found is not None
        for name, value in Blocks().named_parameters():
            assert torch.equal(found[name], value)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_edit_of_one_element_leaves_its_neighbours_in_the_block_exact(stage: int) -> None:
    def fn(rank: int) -> dict[str, Tensor]:
        model = Blocks()
        engine = engine_of(model, stage=stage, bucket_mb=1e-9, quantized_gathers="int8")

        def edit(module: nn.Module, *_: object) -> None:
            with torch.no_grad():
                module.weight[0, 0] = 100.0  # the scale of its block would be another

        nothing = torch.optim.SGD(model.parameters(), lr=0.0)
        handle = model.blocks[0].register_forward_pre_hook(edit)
        step_of(engine, nothing, batch(0, rank))
        handle.remove()
        step_of(engine, nothing, batch(1, rank))
        return masters(engine)

    expected = dict(Blocks().named_parameters())
    with torch.no_grad():
        expected["blocks.0.weight"][0, 0] = 100.0
    for found in run_ranks(fn, _RANKS):
        assert found is not None
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def test_a_third_of_the_bytes_travels() -> None:
    def sent(**options: str) -> int:
        def fn(rank: int) -> int:
            model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
            engine = engine_of(model, stage=3, bucket_mb=1e-9, **options)
            before = engine.collectives.traffic.total_bytes
            with engine.step(), torch.no_grad():
                model(torch.ones(2, 256))
            return engine.collectives.traffic.total_bytes - before

        return run_ranks(fn, 2)[0] or 0

    assert sent() == 3 * 2 * 256 * 256
    blocks = 256 * 256 // 2 // BLOCK
    assert sent(quantized_gathers="int8") == 3 * (BLOCK * blocks + 4 * blocks + 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 0}, "gather none"),
        ({"stage": 3, "offload": "parameters"}, "host memory"),
        ({"stage": 3, "same_bits": True}, "same_bits"),
    ],
)
def test_what_could_not_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions(quantized_gathers="int8", **options)
