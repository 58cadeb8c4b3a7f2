"""Expert parallel training equals a single device's, with data parallel of any stage."""

from functools import cache
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch

from lightning_shard import HybridParallelStrategy
from tests.expert_parallel.models import EXPERT_MODELS
from tests.strategies.parity import (
    LONG_STEPS,
    SMALL_BUCKET_MB,
    Gradients,
    Run,
    assert_parity,
    ignoring,
    train,
)

pytestmark = ignoring()

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, and the strategy's options
    **{f"ep2-stage{stage}": (2, {"zero_stage": stage}) for stage in range(4)},
    **{f"ep2-dp2-stage{stage}": (4, {"zero_stage": stage}) for stage in range(4)},
    **{
        f"ep4-stage{stage}": (4, {"expert_parallel_size": 4, "zero_stage": stage})
        for stage in range(4)
    },
    "ep-slowest": (4, {"axis_order": ("ep", "pp", "dp", "tp"), "zero_stage": 1}),
    "ep2-tp2": (4, {"tensor_parallel_size": 2, "zero_stage": 1}),
    "ep2-tp2-stage3": (4, {"tensor_parallel_size": 2, "zero_stage": 3}),
    "ep2-pp2": (4, {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 1}),
    "ep2-pp2-dp2-stage2": (
        8,
        {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 2},
    ),
}
# Each model and each layout once; `make test-all` runs the others.
QUICK = {
    ("mixtral", "ep2-dp2-stage0"),
    ("listed", "ep2-dp2-stage1"),
    ("seldom", "ep4-stage2"),
    ("deepseek_v3", "ep2-stage3"),
}


def build(name: str) -> Any:
    """Return the model, with the same values every time."""
    torch.manual_seed(7)
    return EXPERT_MODELS[name]()


@cache
def with_gradients(model: str) -> tuple[Run, Gradients]:
    """Return what a single device makes of it, and the norm of each parameter's gradient."""
    seen = Gradients()
    return train(build(model), num_steps=LONG_STEPS, curve=seen), seen


def single_device(model: str) -> Run:
    """Return what a single device makes of it."""
    return with_gradients(model)[0]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, marks=() if (model, layout) in QUICK else pytest.mark.slow)
        for model in EXPERT_MODELS
        for layout in LAYOUTS
        if model != "seldom"
        or "tp" not in layout  # of which tensor parallel finds nothing to split
    ],
)
def test_equals_a_single_device(model: str, layout: str) -> None:
    num_ranks, options = LAYOUTS[layout]
    strategy = HybridParallelStrategy(
        **({"expert_parallel_size": 2} | options), backend="in_process"
    )
    strategy.run.options.__dict__["bucket_mb"] = SMALL_BUCKET_MB
    own = Gradients()
    run = train(build(model), strategy=strategy, devices=num_ranks, num_steps=LONG_STEPS, curve=own)
    expected, gradients = with_gradients(model)
    assert_parity(run, expected, num_steps=LONG_STEPS)
    own.assert_close(gradients)


class Products(Gradients):
    """Records the product of each parameter with its gradient."""

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        there = [param for param in pl_module.parameters() if param.grad is not None]
        found = [(param.detach() * param.grad).sum().item() for param in there]
        self.of_params[-1] += [abs(product) for product in found]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep2-stage1", "ep2-dp2-stage2"])
def test_a_gradient_is_computed_with_on_the_ranks_that_have_its_expert(layout: str) -> None:
    """Ranks that had it asked those that had not, and waited for ever."""
    num_ranks, options = LAYOUTS[layout]
    strategy = HybridParallelStrategy(expert_parallel_size=2, backend="in_process", **options)
    one, own = Products(), Products()
    train(build("listed"), curve=one)
    train(build("listed"), strategy=strategy, devices=num_ranks, curve=own)
    own.assert_close(one)
