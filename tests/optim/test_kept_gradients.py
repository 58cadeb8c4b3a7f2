"""Optimizers that keep a gradient for their next step, as a single device lets them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.backends.registry import get_backend
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.options import EngineOptions
from lightning_shard.optim.sharded_optimizer import ShardedOptimizer
from lightning_shard.testing import run_ranks

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
        assert dist.group.WORLD is not None
        ranks = get_backend("in_process").collectives(dist.group.WORLD)
        engine = DataParallelEngine(model, ranks, options)
        ShardedOptimizer(optimizer, engine)
    found = []
    for step in range(NUM_STEPS):
        x = torch.linspace(-1, 1, 24).view(4, 6) * (step + 1)
        if way != "two" or step % 2 == 0:
            some = [*model.parameters()][: 3 if way == "some" else None]
            for param in some:
                param.grad = None
        if engine is None:
            loss = model(x).square().mean()
            loss.backward()
        else:
            with engine.step():
                loss = model(x).square().mean()
            with engine.backward():
                loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
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
