"""Optimizers that keep a gradient for their next step, as a single device lets them."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.errors import ConfigError
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks
from tests.data_parallel.one_step import forward_and_backward
from tests.groups import all_ranks, engine_of

NUM_STEPS = 5


class Remembering(Optimizer):
    """Steps along the gradient and the last one, which it keeps without a copy.

    Args:
        params: The parameters.
        keep: What it keeps of a gradient: itself, a view of it, or its array.
    """

    def __init__(self, params: Any, keep: str) -> None:
        super().__init__(params, {"keep": keep})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            last = self.state[param].get("last", torch.zeros(()))
            param.sub_(0.1 * (param.grad + 0.5 * last))
            self.state[param]["last"] = kept(param.grad, self.param_groups[0]["keep"])


def kept(grad: Tensor, keep: str) -> Tensor:
    """Return what stays of a gradient, in its memory."""
    if keep == "array":
        return torch.from_numpy(grad.numpy())
    return grad if keep == "itself" else grad.view(grad.shape)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    """Return a loss."""
    result: Tensor = model(x)
    return result.square().mean()


def losses(keep: str, options: EngineOptions | None, way: str) -> list[float]:
    """Return the losses of a run.

    Args:
        keep: What the optimizer keeps.
        options: None for a single device.
        way: When gradients are zeroed: "each" step, or after "two", and "some" of them alone.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
    optimizer = Remembering(model.parameters(), keep)
    engine = None
    if options is not None:
        ranks = all_ranks()
        engine = DataParallelEngine(model, ranks, options)
        ShardedOptimizer(optimizer, engine)
    found = []
    for step in range(NUM_STEPS):
        x = torch.linspace(-1, 1, 24).view(4, 6) * (step + 1)
        if way != "two" or step % 2 == 0:
            some = [*model.parameters()][: 3 if way == "some" else None]
            for param in some:
                param.grad = None
        loss = forward_and_backward(engine, partial(mean_square, model, x))
        optimizer.step()
        found.append(float(loss))
    return found


@pytest.mark.parametrize(
    ("keep", "way"),
    [(keep, way) for keep in ("itself", "view", "array") for way in ("each", "two")]
    + [("itself", "some")],
)
@pytest.mark.parametrize(
    ("stage", "offload"), [(0, None), (1, None), (2, None), (3, None), (2, "optimizer")]
)
def test_a_kept_gradient_is_the_last_step_s(stage: int, offload: Any, keep: str, way: str) -> None:
    options = EngineOptions(stage=stage, bucket_mb=1e-5, offload=offload)
    expected = losses(keep, None, way)
    for found in run_ranks(lambda _: losses(keep, options, way), 2):
        assert found == pytest.approx(expected, rel=1e-5)


class KeepingSome(Optimizer):
    """Keeps views of some gradients, and steps along what it has kept."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for index, param in enumerate(self.param_groups[0]["params"]):
            if param.grad is None:
                continue
            last = self.state[param].pop("last", torch.zeros(()))
            param.sub_(0.1 * (param.grad + 0.5 * last))
            if index == 2 or (self.num_steps == 1 and index > 2):
                self.state[param]["last"] = kept(param.grad, "view")


class Layers(nn.Module):
    """Two blocks of two layers, of which a forward may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2)
        )

    def forward(self, x: Tensor, used: int) -> Tensor:
        for block in self.blocks[:used]:
            x = block(x)
        return x.square().mean()


def mean_loss(model: nn.Module, x: Tensor, own: list[int]) -> Tensor:
    """Return the mean of the losses of forwards that use so many blocks."""
    return torch.stack([model(x, used) for used in own]).mean()


def losses_of_blocks(
    make: Any, options: EngineOptions | None, zeroed: dict[int, int], used: dict[int, int]
) -> list[float]:
    """Return the losses of a run, on a rank its own.

    Args:
        make: Makes the optimizer of parameters.
        options: None for a single device, which does the ranks' forwards one after the other, and
            has the mean of their losses.
        zeroed: By step from which parameter on gradients are zeroed; all in the others.
        used: By step how many blocks rank 1 uses; all in the others.
    """
    torch.manual_seed(0)
    model = Layers()
    optimizer, engine, found = make(model.parameters()), None, []
    if options is not None:
        ranks = all_ranks()
        engine = DataParallelEngine(model, ranks, options)
        ShardedOptimizer(optimizer, engine)
    for step in range(NUM_STEPS):
        x = torch.linspace(-1, 1, 24).view(4, 6) * (step + 1)
        for param in [*model.parameters()][zeroed.get(step, 0) :]:
            param.grad = None
        blocks = [2, used.get(step, 2)]
        own = blocks if engine is None else [blocks[engine.collectives.rank]]
        loss = forward_and_backward(engine, partial(mean_loss, model, x, own))
        optimizer.step()
        found.append(float(loss))
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_views_that_are_kept_after_some_gradients_were_zeroed_stay_and_have_memory(
    stage: int,
) -> None:
    options = EngineOptions(stage=stage, bucket_mb=1e-3)
    expected = losses_of_blocks(KeepingSome, None, {1: 2}, {})
    for rank, found in enumerate(
        run_ranks(lambda _: losses_of_blocks(KeepingSome, options, {1: 2}, {}), 2)
    ):
        assert found == pytest.approx(expected, rel=1e-5), rank


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_kept_gradient_stays_where_a_rank_has_none_for_its_buffer(stage: int) -> None:
    def make(params: Any) -> Remembering:
        return Remembering(params, "itself")

    options = EngineOptions(stage=stage, bucket_mb=2.5e-4)
    expected = losses_of_blocks(make, None, {}, {1: 1})
    found = run_ranks(lambda _: losses_of_blocks(make, options, {}, {1: 1}), 2)
    assert torch.tensor(found).mean(0).tolist() == pytest.approx(expected, rel=1e-5)


def norm_of_what_was_kept(rank: int) -> str:
    model = nn.Sequential(nn.Linear(6, 6))
    engine = engine_of(model, stage=2)
    views: list[Tensor] = []
    for factor in (1.0, 2.0):
        model.zero_grad()
        forward_and_backward(engine, partial(mean_square, model, torch.full((2, 6), factor)))
        views += [p.grad.view_as(p) for p in model.parameters() if p.grad is not None]
    try:
        views[0].norm()
    except ConfigError as error:
        return str(error)
    return ""


def test_the_norm_of_a_view_of_a_gradient_that_is_gone_is_refused() -> None:
    """The norm of a view of a gradient that is gone was the next one s."""
    for found in run_ranks(norm_of_what_was_kept, 1):
        assert "Keep p.grad.clone()" in found
