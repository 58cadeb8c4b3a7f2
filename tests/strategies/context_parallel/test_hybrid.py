"""Sequences in parts, beside layers in parts and stages, train as a single device does."""

from typing import Any

import pytest

from lightning_shard import HybridParallelStrategy
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    UPSTREAM_WARNINGS,
    Case,
    assert_parity,
    build,
    single_device,
    train,
)

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS]

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, and the strategy's options
    "cp2-tp2": (4, {"tensor_parallel_size": 2}),
    "cp2-pp2": (4, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "cp2-tp2-dp2-stage3": (8, {"tensor_parallel_size": 2, "zero_stage": 3}),
    "cp2-pp2-tp2": (
        8,
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2},
    ),
    "cp2-pp2-dp2-stage2": (
        8,
        {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 2},
    ),
    "cp2-pp2-zbv-recomputed": (
        4,
        {"pipeline_parallel_size": 2, "num_microbatches": 2, "schedule": "gpipe"}
        | {"activation_checkpointing": "full"},
    ),
    "one sequence a rank": (
        4,
        {"context_parallel_size": 1, "tensor_parallel_size": 2, "zero_stage": 1},
    ),
    "cp-slowest": (4, {"tensor_parallel_size": 2, "axis_order": ("cp", "pp", "dp", "tp")}),
}
QUICK = {
    ("llama", "cp2-tp2"),
    ("gpt", "cp2-pp2"),
    ("encoder", "cp-slowest"),
    ("gpt", "one sequence a rank"),
}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(model, layout, marks=() if (model, layout) in QUICK else pytest.mark.slow)
        for model in ("gpt", "llama", "gpt2", "encoder", "bert", "nanogpt")
        for layout in LAYOUTS
    ],
)
def test_equals_a_single_device(model: str, layout: str) -> None:
    num_ranks, options = LAYOUTS[layout]
    strategy = HybridParallelStrategy(
        **({"zero_stage": 0, "context_parallel_size": 2} | options), backend="in_process"
    )
    strategy._options.__dict__["bucket_mb"] = SMALL_BUCKET_MB
    run = train(build(model), strategy=strategy, devices=num_ranks)
    assert_parity(run, single_device(Case(model=model, strategy="", num_ranks=1)))
