"""Compiled blocks of sequences in parts: what needs no other position runs compiled on its rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shard import ContextParallelStrategy, HybridParallelStrategy
from lightning_shard.context_parallel import cut_blocks
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

pytestmark = ignoring(
    r"The .grad attribute of a Tensor that is not a leaf",
    r"`torch.jit.script_method` is deprecated",  # inductor
    ".*which has no rule",
)


def blocks_of(model: nn.Module) -> nn.ModuleList:
    return next(one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) > 1)


def compile_blocks(model: nn.Module, backend: str) -> None:
    for block in blocks_of(model):
        block.compile(backend=backend)


def wrap_blocks(model: nn.Module, backend: str) -> None:
    blocks = blocks_of(model)
    for number, block in enumerate(blocks):
        blocks[number] = torch.compile(block, backend=backend)


HOW: dict[str, Callable[[nn.Module, str], None]] = {"method": compile_blocks, "wrap": wrap_blocks}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, {}),
    "cp2-stage3": (2, {"zero_stage": 3}),
    "cp2-tp2": (4, {"tensor_parallel_size": 2}),
    "cp2-pp2": (4, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "cp2-recomputed": (2, {"activation_checkpointing": "full"}),
    "cp2-pp2-recomputed": (
        4,
        {"pipeline_parallel_size": 2, "num_microbatches": 2, "activation_checkpointing": "full"},
    ),
}
CASES = [
    ("llama", "method", "cp2", "aot_eager"),
    *(("llama", "method", layout, "aot_eager") for layout in list(LAYOUTS)[1:]),
    ("llama", "method", "cp2-stage3", "inductor"),
    *((model, "method", "cp2", "aot_eager") for model in ("gpt", "bert", "encoder", "qwen3")),
    ("llama", "wrap", "cp2", "aot_eager"),
    ("gpt", "wrap", "cp2", "aot_eager"),
]


@pytest.fixture
def on_rows(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Classes of the modules that are run on their rows."""
    seen: set[str] = set()
    own = cut_blocks.extend_class

    def extend(module: nn.Module, prefix: str, mixin: type) -> None:
        seen.add(type(module).__name__)
        own(module, prefix, mixin)

    monkeypatch.setattr(cut_blocks, "extend_class", extend)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "how", "layout", "backend"),
    [
        pytest.param(*case, marks=() if number == 0 else pytest.mark.slow)
        for number, case in enumerate(CASES)
    ],
)
def test_equals_a_single_device(
    model: str, how: str, layout: str, backend: str, on_rows: set[str]
) -> None:
    num_ranks, options = LAYOUTS[layout]
    strategy = HybridParallelStrategy(
        **({"zero_stage": 0, "context_parallel_size": 2} | options),
        backend="in_process",
        bucket_mb=SMALL_BUCKET_MB,
    )
    module = build(model)
    HOW[how](module, backend)
    run = train(module, strategy=strategy, devices=num_ranks)
    expected = single_device(Case(model=model, strategy="", num_ranks=1))
    weights = {name.replace("_orig_mod.", ""): value for name, value in run.weights.items()}
    run = type(run)(losses=run.losses, norms=run.norms, weights=weights)
    assert_parity(run, expected)
    if model == "llama" and "pp2" not in layout:
        assert on_rows >= {"LlamaRMSNorm"}
    classes = {type(one).__name__ for one in module.modules()}
    assert not any(name.startswith("OnRows") for name in classes)


class Dropping(nn.Module):
    """Drops out within, so that its rows are not alone."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(32, 32), nn.Linear(32, 32), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.down(self.up(x).relu()))


class Remembering(Dropping):
    """Keeps something of what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = super().forward(x)
        return self.last


class Mixing(Dropping):
    """Looks at other positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.mean(1, keepdim=True)


INNER: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "alone": (lambda: Dropping(0.0), True),
    "drops out": (lambda: Dropping(0.5), False),
    "keeps what it is given": (lambda: Remembering(0.0), False),
    "looks at others": (lambda: Mixing(0.0), False),
}


def with_inner(kind: str) -> Any:
    torch.manual_seed(7)
    made = build("gpt")
    for block in made.blocks:
        block.down = nn.Sequential(block.down, INNER[kind][0]())
    return made


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("kind", INNER)
def test_modules_run_on_their_rows_only_if_they_need_nothing_else(
    kind: str, on_rows: set[str]
) -> None:
    module = with_inner(kind)
    compile_blocks(module, "eager")
    run = train(module, strategy=ContextParallelStrategy(backend="in_process"), devices=2)
    if kind != "drops out":  # attention's own numbers are others
        assert_parity(run, train(with_inner(kind)))
    assert ("Sequential" in on_rows) == INNER[kind][1]


@pytest.mark.slow
def test_a_network_that_is_compiled_as_a_whole_is_refused() -> None:
    module = build("llama")
    module.network.compile(backend="eager")
    with pytest.raises(
        ConfigError, match=r"network .* is compiled as a whole, but context_parallel"
    ):
        train(module, strategy=ContextParallelStrategy(backend="in_process"), devices=2)


def test_compiled_modules_beside_blocks_are_compiled_where_tensors_are_full() -> None:
    module = build("gpt")
    module.head.compile(backend="eager")
    run = train(module, strategy=ContextParallelStrategy(backend="in_process"), devices=2)
    assert_parity(run, single_device(Case(model="gpt", strategy="", num_ranks=1)))
