"""Tensor parallel training equals a single device's, alone and with data parallel of any stage."""

from collections.abc import Iterable
from typing import Any

import pytest

from lightning_shard.errors import ConfigError
from lightning_shard.strategies.tensor_parallel import TensorParallelStrategy
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    UPSTREAM_WARNINGS,
    Case,
    Run,
    assert_bitwise_equal,
    assert_parity,
    build,
    single_device,
    train,
)

pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS]

PLANS: dict[str, dict[str, Any]] = {
    "gpt": {
        "byte_embedding": "embedding_rowwise",
        "position_embedding": "embedding_colwise",
        "blocks.*.qkv": "packed_colwise(3)",
        "blocks.*.attention_out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": "colwise_gather_output",
    },
    "llama": {
        "network.model.layers.*.self_attn.q_proj": "colwise",
        "network.model.layers.*.self_attn.k_proj": "colwise",
        "network.model.layers.*.self_attn.v_proj": "colwise",
        "network.model.layers.*.self_attn.o_proj": "rowwise",
        "network.model.layers.*.mlp.gate_proj": "colwise",
        "network.model.layers.*.mlp.up_proj": "colwise",
        "network.model.layers.*.mlp.down_proj": "rowwise",
        "network.model.embed_tokens": "embedding_rowwise",
        "network.lm_head": "colwise_gather_output",
    },
    "gpt2": {
        "network.transformer.wte": "embedding_rowwise",
        "network.transformer.h.*.attn.c_attn": "packed_colwise(3)",
        "network.transformer.h.*.attn.c_proj": "rowwise",
        "network.transformer.h.*.mlp.c_fc": "colwise",
        "network.transformer.h.*.mlp.c_proj": "rowwise",
        "network.lm_head": "colwise_gather_output",  # tied to wte
    },
}


def slow(values: Iterable[Any]) -> list[Any]:
    """Leave these to `make test-all`."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def train_split(model: str, num_ranks: int, size: int, **options: Any) -> Run:
    strategy = TensorParallelStrategy(
        backend="in_process", tensor_parallel_size=size, plan=PLANS[model], **options
    )
    strategy._options.__dict__["bucket_mb"] = SMALL_BUCKET_MB
    return train(build(model), strategy=strategy, devices=num_ranks)


@pytest.mark.parametrize(
    ("model", "size"), [("gpt", 2), ("gpt", 4), ("llama", 2), ("gpt2", 2), ("gpt2", 4)]
)
def test_equals_a_single_device(model: str, size: int) -> None:
    run = train_split(model, size, size)
    assert_parity(run, single_device(Case(model=model, strategy="", num_ranks=1)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", ["gpt", *slow(name for name in PLANS if name != "gpt")])
def test_with_data_parallel_it_equals_a_single_device(model: str, stage: int) -> None:
    run = train_split(model, 4, 2, zero_stage=stage)
    assert_parity(run, single_device(Case(model=model, strategy="", num_ranks=2)))


AUTOMATIC = ("encoder", "gpt", "llama", "gpt2", "bert", "t5", "vit", "mixtral", "qwen3")


def train_automatically(model: str, num_ranks: int, size: int, stage: int = 0) -> Run:
    strategy = TensorParallelStrategy(
        backend="in_process", tensor_parallel_size=size, plan="auto", zero_stage=stage
    )
    strategy._options.__dict__["bucket_mb"] = SMALL_BUCKET_MB
    return train(build(model), strategy=strategy, devices=num_ranks)


@pytest.mark.parametrize("size", [2, *slow([4])])
@pytest.mark.parametrize("model", AUTOMATIC)
def test_with_an_automatic_plan_it_equals_a_single_device(model: str, size: int) -> None:
    run = train_automatically(model, size, size)
    assert_parity(run, single_device(Case(model=model, strategy="", num_ranks=1)))


@pytest.mark.parametrize("stage", [0, *slow([1, 2]), 3])
@pytest.mark.parametrize("model", ["encoder", *slow(["mixtral", "qwen3"])])
def test_with_an_automatic_plan_and_data_parallel_it_equals_a_single_device(
    model: str, stage: int
) -> None:
    run = train_automatically(model, 4, 2, stage)
    assert_parity(run, single_device(Case(model=model, strategy="", num_ranks=2)))


def test_without_a_plan_one_is_found() -> None:
    strategy = TensorParallelStrategy(backend="in_process", plan=None)
    run = train(build("gpt"), strategy=strategy, devices=2)
    assert_bitwise_equal(run, train_automatically("gpt", 2, 2))


def test_a_plan_of_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match="plan must be 'auto' or map patterns to styles, got 'al"):
        TensorParallelStrategy(backend="in_process", plan="all")


def test_more_ranks_than_heads_are_refused_before_training() -> None:
    strategy = TensorParallelStrategy(backend="in_process")
    with pytest.raises(ConfigError, match=r"Block has 4 heads, .* 8 ranks .* of 1, 2, 4"):
        train(build("gpt"), strategy=strategy, devices=8)
