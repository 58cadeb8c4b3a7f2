"""Tensor parallel training equals a single device's, alone and with data parallel of any stage."""

from collections.abc import Container, Iterable
from itertools import product
from typing import Any

import pytest

from lightning_shard.errors import ConfigError
from lightning_shard.strategies.model_parallel import TensorParallelStrategy
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    Case,
    Run,
    assert_bitwise_equal,
    assert_parity,
    build,
    ignoring,
    single_device,
    train,
)

pytestmark = ignoring()

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


MODELS = (
    *("encoder", "gpt", "llama", "gpt2", "bert", "t5", "vit", "mixtral", "qwen3"),
    "nanogpt",  # its attention in parts that look full
)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, and the strategy's options
    "tp2": (2, {}),
    "tp4": (4, {}),
    **{
        f"tp2-dp2-stage{stage}": (4, {"tensor_parallel_size": 2, "zero_stage": stage})
        for stage in range(4)
    },
    "tp4-sequence": (4, {"sequence_parallel": True}),
    "tp2-dp2-stage3-sequence": (
        4,
        {"tensor_parallel_size": 2, "zero_stage": 3, "sequence_parallel": True},
    ),
}
# Each model and each layout once; `make test-all` runs the others.
QUICK = {
    ("encoder", "tp2"),
    ("gpt", "tp2-dp2-stage1"),
    ("llama", "tp2-dp2-stage2"),
    ("gpt2", "tp4"),
    ("bert", "tp2-dp2-stage3"),
    ("t5", "tp2"),
    ("vit", "tp2-dp2-stage0"),
    ("mixtral", "tp2"),
    ("qwen3", "tp4-sequence"),
    ("nanogpt", "tp2"),
}
# Without a cast to fp32 before the loss, and what torch multiplies in fp64.
OF_DOUBLES = ("encoder", "gpt", "bert", "t5", "vit", "nanogpt")


def cases(models: Iterable[str], layouts: Iterable[str], quick: Container[Any] = ()) -> list[Any]:
    """Every model in every layout, but for a ViT's five positions in slices."""
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.slow)
        for case in product(models, layouts)
        if case[0] != "vit" or "sequence" not in case[1]
    ]


def train_split(
    model: str, layout: str, plan: Any = "auto", precision: Any = "32-true"
) -> tuple[Run, Run]:
    """Return what the ranks make of it, and what a single device does."""
    num_ranks, options = LAYOUTS[layout]
    strategy = TensorParallelStrategy(backend="in_process", plan=plan, **options)
    strategy.run.options.__dict__["bucket_mb"] = SMALL_BUCKET_MB
    run = train(build(model), strategy=strategy, devices=num_ranks, precision=precision)
    alone = Case(model=model, strategy="", num_ranks=1, precision=precision)
    return run, single_device(alone)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("model", "layout"), cases(MODELS, LAYOUTS, QUICK))
def test_equals_a_single_device(model: str, layout: str) -> None:
    assert_parity(*train_split(model, layout))


@pytest.mark.slow
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *cases(("gpt", "gpt2"), LAYOUTS, {("gpt", "tp2-dp2-stage3"), ("gpt2", "tp4")}),
        # which shares no heads of keys and values
        *cases(["llama"], [name for name in LAYOUTS if "tp4" not in name], {("llama", "tp2")}),
    ],
)
def test_with_an_explicit_plan_it_equals_a_single_device(model: str, layout: str) -> None:
    assert_parity(*train_split(model, layout, PLANS[model]))


@pytest.mark.parametrize(("model", "layout"), cases(OF_DOUBLES, LAYOUTS))
def test_what_differs_is_rounding(model: str, layout: str) -> None:
    """In fp64 about 1e-15 is left; where T5's norms, in fp32, round otherwise once, 3e-11."""
    assert_parity(*train_split(model, layout, precision="64-true"), rtol=1e-9, atol=1e-11)


def test_without_a_plan_one_is_found() -> None:
    def trained(plan: Any) -> Run:
        strategy = TensorParallelStrategy(backend="in_process", plan=plan)
        return train(build("gpt"), strategy=strategy, devices=2, max_steps=2)

    assert_bitwise_equal(trained(None), trained("auto"))


def test_a_plan_of_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan must be .* patterns and their styles or .auto"):
        TensorParallelStrategy(backend="in_process", plan="all")


def test_more_ranks_than_heads_are_refused_before_training() -> None:
    strategy = TensorParallelStrategy(backend="in_process")
    with pytest.raises(ConfigError, match=r"Block has 4 heads, .* 8 ranks .* of 1, 2, 4"):
        train(build("gpt"), strategy=strategy, devices=8)
