"""Optimizers that need full matrices, under ZeRO: one rank owns each parameter and updates it."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strategies.matrix_optimizers import build
from tests.strategies.parity import (
    CLIP,
    SMALL_BUCKET_MB,
    STRATEGIES,
    UPSTREAM_WARNINGS,
    Run,
    train,
)

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS]
NUM_STEPS = 20
EACH = ("adafactor", "transformers", "muon", "shampoo")


def fit(name: str, strategy: str | None = None, num_ranks: int = 1, **options: Any) -> Run:
    if name == "two":  # manual optimization
        options |= {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    if strategy is not None:
        made = STRATEGIES[strategy](backend="in_process", bucket_mb=SMALL_BUCKET_MB)
        options |= {"strategy": made, "devices": num_ranks}
    return train(build(name), num_steps=NUM_STEPS, **options)


@cache
def alone(name: str) -> Run:
    return fit(name)


def assert_same(run: Run, expected: Run) -> None:
    assert len(run.losses) == len(expected.losses) >= NUM_STEPS
    assert all(norm > CLIP for norm in expected.norms)
    for got, wanted in ((run.losses, expected.losses), (run.norms, expected.norms)):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-5, atol=1e-6)
    for name, weight in run.weights.items():
        scale = float(expected.weights[name].abs().max())
        torch.testing.assert_close(weight, expected.weights[name], rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("name", [*EACH, "two"])
def test_weights_equal_a_single_devices(name: str, strategy: str) -> None:
    assert_same(fit(name, strategy, 3), alone(name))
