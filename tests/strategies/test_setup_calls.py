"""Calls of a set-up and its first steps, counted: they grow as the number of blocks does."""

from functools import partial
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
from tests.call_counts import growing_too_fast
from tests.strategies.parity import ignoring
from tests.trainers import cpu_trainer

WIDTH = 8
NUM_BLOCKS = 4
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


def fit(scheme: str, num_blocks: int) -> None:
    trainer = cpu_trainer(
        strategy=SCHEMES[scheme](backend="in_process", num_ranks=2, announce=False),
        devices=1,
        max_steps=2,
    )
    trainer.fit(Deep(num_blocks), DataLoader(torch.randn(16, WIDTH), batch_size=4))


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.filterwarnings(*(mark.args[0] for mark in ignoring()))
def test_calls_grow_as_the_number_of_blocks_does(scheme: str) -> None:
    """Units, an attention's biases and a pipeline's cut went through all blocks for each block."""
    assert not growing_too_fast(partial(fit, scheme), NUM_BLOCKS)
