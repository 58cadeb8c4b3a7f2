"""A small decoder in double precision, whose attention can be differentiated twice, and schemes.

Every scheme finds by itself what to split of it: heads, pairs of layers, the vocabulary, sequences.
"""

from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_shard import (
    ContextParallelStrategy,
    DDPStrategy,
    HybridParallelStrategy,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeRO2Strategy,
    ZeRO3Strategy,
)
from tests.strategies.schemes import OfRanks
from tests.strategies.stacks import BATCH, Fitted, fit

WIDTH, VOCABULARY, LENGTH, NUM_HEADS = 8, 12, 4, 2


class Attention(nn.Module):
    """Causal attention, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = NUM_HEADS
        self.q, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)  # whose gradient would be noise
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        size, length, _ = x.shape
        shape = (size, length, self.num_heads, WIDTH // NUM_HEADS)
        q, k, v = (one(x).view(shape).transpose(1, 2) for one in (self.q, self.k, self.v))
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2) / 2.0).masked_fill(later, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class DecoderBlock(nn.Module):
    """Attention and a pair of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(torch.tanh(self.up(self.second(x))))


class Decoder(OfRanks):
    """Embedding, two blocks, a norm and a head."""

    block = DecoderBlock

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.build()
        self.double()

    def build(self) -> None:
        """Add what a style needs."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(self.embed(tokens)))

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def dataset(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        size = (BATCH * 3, LENGTH)
        made = [torch.randint(VOCABULARY, size, generator=generator) for _ in range(2)]
        return TensorDataset(*made)


def _hybrid(zero_stage: int) -> Any:
    return HybridParallelStrategy(
        backend="in_process",
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
        zero_stage=zero_stage,
        num_microbatches=2,
        blocks="blocks",
    )


DECODER_SCHEMES: dict[str, tuple[int, Callable[[], Any]]] = {
    "shard_ddp": (2, lambda: DDPStrategy(backend="in_process")),
    "zero2": (2, lambda: ZeRO2Strategy(backend="in_process")),
    "zero3": (2, lambda: ZeRO3Strategy(backend="in_process")),
    "tensor": (2, lambda: TensorParallelStrategy(backend="in_process")),
    "tensor_zero3": (
        4,
        lambda: TensorParallelStrategy(backend="in_process", tensor_parallel_size=2, zero_stage=3),
    ),
    "context": (2, lambda: ContextParallelStrategy(backend="in_process")),
    "context_zero3": (
        4,
        lambda: ContextParallelStrategy(
            backend="in_process", context_parallel_size=2, zero_stage=3
        ),
    ),
    "pipeline": (
        2,
        lambda: PipelineParallelStrategy(backend="in_process", num_microbatches=2, blocks="blocks"),
    ),
    "2x2x2": (8, lambda: _hybrid(1)),
    "2x2x2_zero3": (8, lambda: _hybrid(3)),
}
WITHOUT_STAGES = [one for one in DECODER_SCHEMES if one != "pipeline" and "2x2x2" not in one]
OF_STAGES = ["pipeline", "2x2x2", "2x2x2_zero3"]


def fit_decoder(style: type[Decoder], scheme: str, **options: Any) -> Fitted:
    """Fit a style under a scheme."""
    num_ranks, make = DECODER_SCHEMES[scheme]
    return fit(style, make(), devices=num_ranks, **options)


def assert_as_alone(style: type[Decoder], scheme: str, *, atol: float = 1e-9) -> None:
    """Compare losses and weights with those of one device."""
    alone, got = fit(style), fit_decoder(style, scheme)
    torch.testing.assert_close(got.curve.losses, alone.curve.losses, rtol=1e-9, atol=atol)
    torch.testing.assert_close(got.weights, alone.weights, rtol=1e-9, atol=atol)
