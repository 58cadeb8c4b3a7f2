"""Experts on their ranks beside sequences in parts: ranks route and send their own positions."""

from typing import Any

import pytest
import torch

from lightning_shard import ContextParallelStrategy, HybridParallelStrategy
from tests.strategies.expert_parallel.test_parity import build, single_device
from tests.strategies.parity import (
    ACCUMULATE,
    LONG_STEPS,
    SMALL_BUCKET_MB,
    assert_parity,
    ignoring,
    train,
)

pytestmark = ignoring(
    "The block .* which has no rule"  # experts in lists
)
NUM_TOKENS = 2 * 12 * 16 * ACCUMULATE * LONG_STEPS  # two experts for each word
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"stage {stage}": (4, {"zero_stage": stage}) for stage in range(4)},
    "dp2, stage 2": (8, {"zero_stage": 2}),
    "sequences slowest": (4, {"axis_order": ("cp", "ep", "pp", "dp", "tp"), "zero_stage": 1}),
    "tp2": (8, {"tensor_parallel_size": 2, "zero_stage": 1}),
    "pp2": (8, {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 0}),
    "pp2, recomputed": (
        8,
        {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 0}
        | {"activation_checkpointing": "full"},
    ),
}
MODELS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "attending")
QUICK = {("mixtral", "stage 3"), ("attending", "stage 1")}


def beside(**options: Any) -> HybridParallelStrategy:
    return HybridParallelStrategy(
        backend="in_process",
        expert_parallel_size=2,
        context_parallel_size=2,
        announce=False,
        bucket_mb=SMALL_BUCKET_MB,
        **options,
    )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for model in MODELS
        for layout in LAYOUTS
        for case in [(model, layout)]
    ],
)
def test_equals_a_single_device(model: str, layout: str) -> None:
    num_ranks, options = LAYOUTS[layout]
    strategy = beside(**options)
    run = train(build(model), strategy=strategy, devices=num_ranks, num_steps=LONG_STEPS)
    assert_parity(run, single_device(model), num_steps=LONG_STEPS)
    if model in ("mixtral", "qwen3_moe", "attending"):  # whose every word has two experts
        for load in strategy.expert_load().values():
            assert sum(load.tokens) == NUM_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mixtral", "attending"])
def test_sequences_in_parts_without_shared_experts_equal_a_single_device(model: str) -> None:
    strategy = ContextParallelStrategy(backend="in_process", zero_stage=2)
    run = train(build(model), strategy=strategy, devices=2, num_steps=LONG_STEPS)
    assert_parity(run, single_device(model), num_steps=LONG_STEPS)


def test_experts_compute_the_own_positions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two ranks with parts of a sequence has half of its rows; so has nobody all."""
    rows: list[int] = []
    model = build("mixtral")
    kind = type(model.network.model.layers[0].mlp.experts)
    own = kind.forward

    def seeing(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            rows.append(hidden_states.shape[0])
        return own(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", seeing)
    train(model, strategy=ContextParallelStrategy(backend="in_process"), devices=2, num_steps=1)
    assert set(rows) == {12 * 16 // 2}
