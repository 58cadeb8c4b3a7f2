"""Activation checkpointing and torch.compile under tensor parallel."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_shard import TensorParallelStrategy
from tests.strategies.data_parallel.test_compile import slow
from tests.strategies.models import ExampleGPT, HuggingFaceLM, Trained
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    Case,
    Run,
    assert_parity,
    build,
    ignoring,
    single_device,
    train,
)
from tests.strategies.tensor_parallel.test_tensor_parallel import PLANS

pytestmark = ignoring(
    # torch 2.13 looks at the inputs of what it compiles
    r"The .grad attribute of a Tensor that is not a leaf",
    r"`torch.jit.script_method` is deprecated",  # inductor
)


SEQUENCE = {"sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, and the strategy's options
    "tp2": (2, {}),
    "tp4": (4, {}),
    "tp2-dp2-stage1": (4, {"tensor_parallel_size": 2, "zero_stage": 1}),
    "tp2-dp2-stage3": (4, {"tensor_parallel_size": 2, "zero_stage": 3}),
    "tp2-sequence": (2, SEQUENCE),
    "tp4-sequence": (4, SEQUENCE),
    "tp2-dp2-stage3-sequence": (4, {"tensor_parallel_size": 2, "zero_stage": 3, **SEQUENCE}),
}


def train_split(model: Trained, layout: str, plan: Any = "auto") -> Run:
    num_ranks, options = LAYOUTS[layout]
    strategy = TensorParallelStrategy(backend="in_process", plan=plan, **options)
    strategy.run.options.__dict__["bucket_mb"] = SMALL_BUCKET_MB
    return train(model, strategy=strategy, devices=num_ranks)


class Checkpointed(nn.Module):
    """A block whose activations are computed again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


class CheckpointedGPT(ExampleGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Checkpointed(block) for block in self.blocks)


CHECKPOINTED_PLAN = {
    pattern.replace("blocks.*.", "blocks.*.block."): style
    for pattern, style in PLANS["gpt"].items()
}


def built(cls: type[ExampleGPT]) -> ExampleGPT:
    torch.manual_seed(7)
    return cls()


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        *("tp4", "tp2-dp2-stage3", "tp2-sequence"),
        *slow("tp2", "tp2-dp2-stage1", "tp4-sequence", "tp2-dp2-stage3-sequence"),
    ],
)
def test_activation_checkpointing(layout: str) -> None:
    run = train_split(built(CheckpointedGPT), layout, CHECKPOINTED_PLAN)
    plain = single_device(Case(model="gpt", strategy="", num_ranks=1))
    weights = {name.replace(".block.", "."): value for name, value in run.weights.items()}
    assert_parity(replace(run, weights=weights), plain)


CHECKPOINTED = ("llama", "gpt2", "bert", "t5", "mixtral")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", "tp2-sequence"),
        *slow(
            *product(
                ("llama", "gpt2", "bert", "t5", "mixtral"), ("tp2", "tp2-dp2-stage3-sequence")
            ),
            ("vit", "tp2"),
        ),
    ],
)
def test_activation_checkpointing_of_hugging_face(model: str, layout: str) -> None:
    checkpointed = build(model)
    checkpointed.network.gradient_checkpointing_enable({"use_reentrant": False})
    expected = single_device(Case(model=model, strategy="", num_ranks=1))
    assert_parity(train_split(checkpointed, layout), expected)


class CompiledGPT(ExampleGPT):
    """Compiles its blocks when training starts, as users do in `configure_model` or `setup`."""

    backend = "eager"

    def setup(self, stage: str) -> None:
        for block in self.blocks:
            block.compile(backend=self.backend)


class CompiledGPTAot(CompiledGPT):
    backend = "aot_eager"


class CompiledGPTInductor(CompiledGPT):
    backend = "inductor"


class CompiledWhole(ExampleGPT):
    def setup(self, stage: str) -> None:
        self.compile(backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "layout"),
    [
        (CompiledGPT, "tp2"),
        (CompiledGPTAot, "tp2-sequence"),
        *slow(
            (CompiledGPTAot, "tp2"),
            (CompiledGPTAot, "tp2-dp2-stage1"),
            (CompiledGPTInductor, "tp2"),
            (CompiledGPTInductor, "tp2-sequence"),
            (CompiledWhole, "tp2-sequence"),
        ),
    ],
)
def test_compiled_blocks_between_collectives_train_as_on_one_device(
    cls: type[ExampleGPT], layout: str
) -> None:
    """Compiled blocks could not trace the collectives."""
    torch._dynamo.reset()
    plan = "auto" if "sequence" in layout else PLANS["gpt"]
    run = train_split(built(cls), layout, plan)
    assert_parity(run, single_device(Case(model="gpt", strategy="", num_ranks=1)))


class CompiledLM(HuggingFaceLM):
    def setup(self, stage: str) -> None:
        self.network.compile(backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "bert"])
@pytest.mark.parametrize("layout", ["tp2", "tp2-sequence"])
def test_compiled_code_between_parts_gets_the_size_of_a_tensor(model: str, layout: str) -> None:
    """Dynamo traced the rules of sharded tensor, and `numel()` of one was the tensor itself."""
    torch._dynamo.reset()
    compiled = build(model)
    compiled.__class__ = CompiledLM
    expected = single_device(Case(model=model, strategy="", num_ranks=1))
    assert_parity(train_split(compiled, layout), expected)
