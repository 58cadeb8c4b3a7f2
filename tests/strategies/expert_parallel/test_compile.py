"""Compiled blocks and models whose experts are on several ranks: mixtures run as written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.strategies.context_parallel.test_compile import compile_blocks, wrap_blocks
from tests.strategies.expert_parallel.test_expert_parallel import sharing
from tests.strategies.expert_parallel.test_parity import build, single_device
from tests.strategies.parity import LONG_STEPS, SMALL_BUCKET_MB, assert_parity, ignoring, train

pytestmark = ignoring(
    r"The .grad attribute of a Tensor that is not a leaf",
    r"`torch.jit.script_method` is deprecated",  # inductor
    ".*which has no rule",
)


def compile_all(model: nn.Module, backend: str) -> None:
    model.compile(backend=backend)


HOW: dict[str, Callable[[nn.Module, str], None]] = {
    "blocks": compile_blocks,
    "wrapped blocks": wrap_blocks,
    "module": compile_all,
}
CASES: list[tuple[str, str, str, int, dict[str, Any]]] = [
    ("mixtral", "blocks", "aot_eager", 2, {"zero_stage": 1}),
    ("mixtral", "blocks", "inductor", 2, {"zero_stage": 3}),
    ("mixtral", "blocks", "aot_eager", 4, {"zero_stage": 1, "context_parallel_size": 2}),
    ("mixtral", "blocks", "aot_eager", 4, {"zero_stage": 1, "tensor_parallel_size": 2}),
    *(
        (model, how, "aot_eager", 2, {"zero_stage": 2})
        for model in ("mixtral", "attending", "listed", "deepseek_v3")
        for how in HOW
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "how", "backend", "num_ranks", "options"),
    [
        pytest.param(*case, marks=() if number == 0 else pytest.mark.slow)
        for number, case in enumerate(CASES)
    ],
)
def test_equals_a_single_device(
    model: str, how: str, backend: str, num_ranks: int, options: dict[str, Any]
) -> None:
    torch.compiler.reset()
    module = build(model)
    HOW[how](module, backend)
    strategy = sharing(bucket_mb=SMALL_BUCKET_MB, **options)
    run = train(module, strategy=strategy, devices=num_ranks, num_steps=LONG_STEPS)
    weights = {name.replace("_orig_mod.", ""): value for name, value in run.weights.items()}
    run = type(run)(losses=run.losses, norms=run.norms, weights=weights)
    assert_parity(run, single_device(model), num_steps=LONG_STEPS)
