"""Sequences in parts, beside layers in parts and stages, train as a single device does."""

from typing import Any

import pytest

from lightning_shard import HybridParallelStrategy
from lightning_shard.errors import ConfigError
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    Case,
    assert_parity,
    build,
    ignoring,
    single_device,
    train,
)

pytestmark = ignoring()

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
    "copies of the state": (8, {"data_parallel_size": (2, 2), "zero_stage": 3}),
    "a copy for each sequence": (8, {"data_parallel_size": (4, 1), "zero_stage": 2}),
    "copies, cp-slowest": (
        8,
        {"data_parallel_size": (2, -1), "zero_stage": 3, "axis_order": ("cp", "pp", "dp", "tp")},
    ),
    "cp-slowest": (4, {"tensor_parallel_size": 2, "axis_order": ("cp", "pp", "dp", "tp")}),
}
QUICK = {
    ("llama", "cp2-tp2"),
    ("gpt", "cp2-pp2"),
    ("encoder", "cp-slowest"),
    ("gpt", "one sequence a rank"),
    ("gpt", "copies of the state"),
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


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("pair", "num_shards"), [((2, 2), 4), ((1, 4), 8), ((4, 1), 2), ((-1, 2), 4), ((4, -1), 2)]
)
def test_no_pair_of_copies_and_shards_was_accepted_beside_parts_of_sequences(
    pair: tuple[int, int], num_shards: int
) -> None:
    """One check counted ranks of other samples, and the other all that average gradients."""
    strategy = HybridParallelStrategy(
        backend="in_process", context_parallel_size=2, data_parallel_size=pair, zero_stage=3
    )
    train(build("gpt"), strategy=strategy, devices=8, max_steps=1)
    assert (strategy.mesh.dp, strategy.shard_size) == (4, num_shards)


@pytest.mark.parametrize("pair", [(2, 4), (8, 1), (1, 8), (3, -1)])
def test_pairs_are_of_the_ranks_of_other_samples(pair: tuple[int, int]) -> None:
    strategy = HybridParallelStrategy(
        backend="in_process", context_parallel_size=2, data_parallel_size=pair, zero_stage=3
    )
    with pytest.raises(ConfigError, match=r"4 data-parallel ranks of this run\. Pairs .*\(2, 2\)"):
        train(build("gpt"), strategy=strategy, devices=8, max_steps=1)
