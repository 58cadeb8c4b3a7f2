"""Context parallel training equals a single device's, alone and with data parallel of any stage."""

from collections.abc import Container, Iterable
from itertools import product
from typing import Any

import pytest

from lightning_shard import ContextParallelStrategy
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    UPSTREAM_WARNINGS,
    Case,
    Run,
    assert_parity,
    build,
    single_device,
    train,
)

UNCUT = (r"The block .* which has no rule for a part",)
WARNINGS = (*UPSTREAM_WARNINGS, *UNCUT)
pytestmark = [pytest.mark.filterwarnings(f"ignore:{message}") for message in WARNINGS]

MODELS = ("encoder", "gpt", "llama", "gpt2", "bert", "t5", "mixtral", "qwen3", "nanogpt")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, and the strategy's options
    "cp2": (2, {}),
    "cp4": (4, {}),
    **{
        f"cp2-dp2-stage{stage}": (4, {"context_parallel_size": 2, "zero_stage": stage})
        for stage in range(4)
    },
    "cp4-stage3": (4, {"zero_stage": 3}),
}
# Each model and each layout once; `make test-all` runs the others.
QUICK = {
    ("encoder", "cp2"),
    ("gpt", "cp2-dp2-stage1"),
    ("llama", "cp2-dp2-stage2"),
    ("gpt2", "cp4"),
    ("bert", "cp2-dp2-stage3"),
    ("t5", "cp2"),
    ("mixtral", "cp2"),
    ("qwen3", "cp4-stage3"),
    ("nanogpt", "cp2-dp2-stage0"),
}


def cases(models: Iterable[str], layouts: Iterable[str], quick: Container[Any] = ()) -> list[Any]:
    """Every model in every layout."""
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.slow)
        for case in product(models, layouts)
    ]


def train_cut(model: str, layout: str, precision: Any = "32-true") -> tuple[Run, Run]:
    """Return what the ranks make of it, and what a single device does."""
    num_ranks, options = LAYOUTS[layout]
    strategy = ContextParallelStrategy(backend="in_process", **options)
    strategy.run.options.__dict__["bucket_mb"] = SMALL_BUCKET_MB
    run = train(build(model), strategy=strategy, devices=num_ranks, precision=precision)
    alone = Case(model=model, strategy="", num_ranks=1, precision=precision)
    return run, single_device(alone)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("model", "layout"), cases(MODELS, LAYOUTS, QUICK))
def test_equals_a_single_device(model: str, layout: str) -> None:
    assert_parity(*train_cut(model, layout))
