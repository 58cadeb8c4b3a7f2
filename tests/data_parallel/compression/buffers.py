"""Flat buffers on in-process ranks, and exchanges that average them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.layout import build_layout
from lightning_shard.data_parallel.compression import (
    BF16,
    FP16,
    Codec,
    Compressor,
    Exchange,
    FlatBuffer,
    Int4,
    Int8,
    OneBit,
    PowerSGD,
    TopK,
    Turn,
)
from lightning_shard.data_parallel.compression.state import mean_of_ranks
from tests.groups import all_ranks

SHIPPED: dict[str, Compressor] = {
    "fp16": FP16(),
    "bf16": BF16(),
    "int8": Int8(),
    "int4": Int4(),
    "topk": TopK(ratio=0.1),
    "onebit": OneBit(warmup_steps=0, adam=False),
    "powersgd": PowerSGD(rank=2),
    "powersgd16": PowerSGD(rank=2, factor_dtype="bfloat16"),
}
SHAPES = [("matrix", (24, 40)), ("vector", (7,)), ("cube", (6, 5, 8)), ("scalar", ())]


class Exact(Codec):
    """Sends values as they are."""

    def encode(self, values: Tensor, turn: Turn) -> Sequence[Tensor]:
        return (values,)

    def decode(self, fields: Sequence[Tensor], numel: int) -> Tensor:
        return fields[0]


def world(backend: str) -> Collectives:
    return all_ranks(backend)


def make_exchange(
    compressor: Compressor, *, keeps_all: bool, backend: str = "in_process", **options: Any
) -> Exchange:
    """Each rank must call."""
    ranks = world(backend)
    layout = build_layout(SHAPES, num_shards=1 if keeps_all else ranks.size, align=4)
    return compressor.exchange(
        FlatBuffer(layout=layout, ranks=ranks, keeps_all=keeps_all, **options)
    )


def gradient(buffer: FlatBuffer, rank: int, step: int, seed: int = 0) -> Tensor:
    """A rank's gradient of a step, zero in the gaps."""
    generator = torch.Generator().manual_seed(seed + 1000 * rank + step)
    full = torch.zeros(buffer.numel)
    for view in buffer.views(full).values():
        view.copy_(torch.randn(view.shape, generator=generator))
    return full


def state_of(exchange: Exchange) -> dict[str, dict[str, Tensor]]:
    """Return what further steps depend on, with means of what ranks keep; each rank must call."""
    kept = exchange.buffer.ranks.all_gather_object(exchange.own_state())
    owned = [one.get("owned", {}) for one in kept]
    means = {
        kind: dict(mean_of_ranks([one[kind] for one in kept], owned if kind == "residual" else ()))
        for kind in ("residual", "momentum")
        if kind in kept[0]
    }
    return {**means, **exchange.common_state()}


def average(exchange: Exchange, values: Tensor) -> Tensor:
    """Average once; the full tensor, or the own segment."""
    buffer = exchange.buffer
    out = torch.empty(buffer.numel if buffer.keeps_all else buffer.segment_numel)
    exchange.begin(values, out)
    exchange.wait()
    return out


def full(exchange: Exchange, part: Tensor) -> Tensor:
    """The full average of what `average` returned; each rank must call."""
    if exchange.buffer.keeps_all:
        return part
    full = part.new_empty(exchange.buffer.numel)
    exchange.buffer.ranks.all_gather(full, part).wait()
    return full


def mean(buffer: FlatBuffer, steps: Sequence[int], num_ranks: int, seed: int = 0) -> Tensor:
    """The exact average over ranks, summed over steps."""
    grads = [gradient(buffer, rank, step, seed) for rank in range(num_ranks) for step in steps]
    return torch.stack(grads).double().sum(0).div(num_ranks).float()
