"""Calls of a set-up and its first steps, counted: they grow as the number of blocks does.

Of each function of the package the calls that the second half of twice as many blocks adds are
counted beside those that the first half adds, so that what is made once for a model counts for
nothing, and a function that looks at every block for every block is found, and named.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import (
    DDPStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from tests.strategies.parity import ignoring
from tests.trainers import cpu_trainer

WIDTH = 8
NUM_BLOCKS = 4
MOST_GROWTH = 2.2  # of calls by twice as many blocks
FEW = 24  # calls that may come or go, as of weak references that the garbage collector ends
SCHEMES = {
    "shard_ddp": DDPStrategy,
    "zero2": ZeRO2Strategy,
    "zero3": ZeRO3Strategy,
    "pipeline_parallel": PipelineParallelStrategy,
    "tensor_parallel": TensorParallelStrategy,
}


class Attention(nn.Module):
    """An attention of two heads over the samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, C) -> (B, C)
        of_heads = (one(x).view(len(x), self.num_heads, -1) for one in (self.q_proj, self.k_proj))
        weights = torch.einsum("bhc,bhc->bh", *of_heads)[..., None]
        values = self.v_proj(x).view(len(x), self.num_heads, -1)
        return self.o_proj((weights * values).reshape(len(x), -1))


class Block(nn.Module):
    """An attention, and a pair of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (B, C) -> (B, C)
        x = x + self.attention(self.norm(x))
        return x + self.down(self.up(x).relu())


class Deep(L.LightningModule):
    """So many blocks; and so many parts of equal shapes, which no list holds."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleDict({f"part{i}": nn.Linear(WIDTH, 3) for i in range(num_blocks)})

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch)
        for block in self.blocks:
            x = block(x)
        x = self.last(x)
        return x.pow(2).mean() + sum(part(x).mean() for part in self.parts.values())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@contextmanager
def counting_calls() -> Iterator[Counter[str]]:
    """Count the calls inside of each function of the package, on this thread and those begun."""
    counts: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and "/lightning_shard/" in file:
            counts[f"{file.rpartition('/lightning_shard/')[2]}:{frame.f_code.co_qualname}"] += 1

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield counts
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]


def calls_of_fit(scheme: str, num_blocks: int) -> Counter[str]:
    trainer = cpu_trainer(
        strategy=SCHEMES[scheme](backend="in_process", num_ranks=2, announce=False),
        devices=1,
        max_steps=2,
    )
    model = Deep(num_blocks)
    with counting_calls() as counts:
        trainer.fit(model, DataLoader(torch.randn(16, WIDTH), batch_size=4))
    return counts


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.filterwarnings(*(mark.args[0] for mark in ignoring()))
def test_calls_grow_as_the_number_of_blocks_does(scheme: str) -> None:
    """Units, an attention's biases and a pipeline's cut went through all blocks for each block."""
    calls_of_fit(scheme, 2)  # what is made once for a process
    few, more, many = (calls_of_fit(scheme, factor * NUM_BLOCKS) for factor in (1, 2, 4))
    grown = {
        name: (few[name], more[name], calls)
        for name, calls in many.items()
        if calls - more[name] > MOST_GROWTH * (more[name] - few[name]) + FEW
    }
    assert not grown
