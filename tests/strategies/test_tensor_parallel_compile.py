"""Activation checkpointing and torch.compile under tensor parallel."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_shard import TensorParallelStrategy
from tests.strategies.models import ExampleGPT
from tests.strategies.parity import (
    SMALL_BUCKET_MB,
    UPSTREAM_WARNINGS,
    Case,
    assert_parity,
    single_device,
    train,
)
from tests.strategies.test_tensor_parallel import PLANS

pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore:{message}") for message in UPSTREAM_WARNINGS),
    # torch 2.13 looks at the inputs of what it compiles
    pytest.mark.filterwarnings(r"ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings(r"ignore:`torch.jit.script_method` is deprecated"),  # inductor
]


def strategy_of(size: int, stage: int, plan: Any) -> TensorParallelStrategy:
    strategy = TensorParallelStrategy(
        backend="in_process", tensor_parallel_size=size, plan=plan, zero_stage=stage
    )
    strategy._options.__dict__["bucket_mb"] = SMALL_BUCKET_MB
    return strategy


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


@pytest.mark.parametrize(
    ("num_ranks", "size", "stage"), [(2, 2, 0), (4, 4, 0), (4, 2, 1), (4, 2, 3)]
)
def test_activation_checkpointing(num_ranks: int, size: int, stage: int) -> None:
    strategy = strategy_of(size, stage, CHECKPOINTED_PLAN)
    run = train(built(CheckpointedGPT), strategy=strategy, devices=num_ranks)
    plain = single_device(Case(model="gpt", strategy="", num_ranks=1))
    weights = {name.replace(".block.", "."): value for name, value in run.weights.items()}
    assert_parity(type(run)(losses=run.losses, norms=run.norms, weights=weights), plain)


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


@pytest.mark.parametrize(
    ("cls", "num_ranks", "size", "stage"),
    [
        (CompiledGPT, 2, 2, 0),
        (CompiledGPTAot, 2, 2, 0),
        (CompiledGPTAot, 4, 2, 1),
        pytest.param(CompiledGPTInductor, 2, 2, 0, marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_could_not_trace_the_collectives(
    cls: type[ExampleGPT], num_ranks: int, size: int, stage: int
) -> None:
    torch._dynamo.reset()
    run = train(built(cls), strategy=strategy_of(size, stage, PLANS["gpt"]), devices=num_ranks)
    assert_parity(run, single_device(Case(model="gpt", strategy="", num_ranks=1)))
