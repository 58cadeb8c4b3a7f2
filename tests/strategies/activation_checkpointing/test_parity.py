"""Training with activations that are computed again is training, under every strategy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from lightning_shard import (
    AsyncSGDStrategy,
    DDPStrategy,
    ElasticStrategy,
    HybridParallelStrategy,
    LocalSGDStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO1Strategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    Case,
    assert_parity,
    build,
    ignoring,
    single_device,
    train,
)
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS

pytestmark = ignoring(r".* microbatches are fewer than the .* stages")

SLOW = pytest.mark.slow
GPT_BLOCK, GPT_PLAN = ["Block"], PLANS["gpt"]
STAGES = {"backend": "in_process", "num_microbatches": 4}
SPLIT_3D = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
Make = Callable[..., Any]
STRATEGIES: dict[str, tuple[Make, str, int]] = {
    "shard_ddp": (partial(DDPStrategy, backend="in_process"), "gpt", 2),
    "zero1": (partial(ZeRO1Strategy, backend="in_process"), "gpt", 2),
    "zero2": (partial(ZeRO2Strategy, backend="in_process"), "gpt", 2),
    "zero3": (partial(ZeRO3Strategy, backend="in_process"), "gpt", 2),
    "tensor": (partial(TensorParallelStrategy, backend="in_process", plan=GPT_PLAN), "gpt", 2),
    "sequence": (
        partial(TensorParallelStrategy, backend="in_process", sequence_parallel=True),
        "gpt",
        2,
    ),
    **{
        schedule: (partial(PipelineParallelStrategy, schedule=schedule, **STAGES), model, 2)
        for schedule, model in {
            "1f1b": "gpt",
            "gpipe": "gpt",
            "zbv": "gpt_8",
            "interleaved_1f1b": "gpt_8",
            "looped_bfs": "gpt_8",
            "interleaved_zero_bubble": "gpt_8",
            "dual_pipe_v": "gpt_8",
        }.items()
    },
    **{
        f"hybrid-stage{stage}": (
            partial(HybridParallelStrategy, plan=GPT_PLAN, zero_stage=stage, **SPLIT_3D, **STAGES),
            "gpt",
            8,
        )
        for stage in range(4)
    },
    "hybrid-zbv-stage3": (
        partial(HybridParallelStrategy, zero_stage=3, schedule="zbv", **SPLIT_3D, **STAGES),
        "gpt_8",
        8,
    ),
    "elastic": (partial(ElasticStrategy, backend="in_process", scheme="zero3"), "gpt", 2),
    "local_sgd": (partial(LocalSGDStrategy, backend="in_process", warmup_steps=1000), "gpt", 2),
    "async_sgd": (partial(AsyncSGDStrategy, backend="in_process", warmup_steps=1000), "gpt", 2),
}
QUICK = {("zero3", "full"), ("zbv", "full"), ("sequence", "selective")}
CHOICES: dict[str, Any] = {"full": "full", "selective": "selective", "classes": GPT_BLOCK}


@pytest.mark.few_cases(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "choice"),
    [
        pytest.param(name, choice, marks=() if (name, choice) in QUICK else SLOW)
        for name in STRATEGIES
        for choice in CHOICES
    ],
)
def test_one_device(name: str, choice: str) -> None:
    make, model, num_ranks = STRATEGIES[name]
    strategy = make(activation_checkpointing=CHOICES[choice], bucket_mb=SMALL_BUCKET_MB)
    run = train(build(model), strategy=strategy, devices=num_ranks)
    assert_parity(run, single_device(Case(model=model, strategy="", num_ranks=1)))
