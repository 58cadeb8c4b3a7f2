"""The average of one vector over the ranks, in place: in float32, or in bfloat16 on the wire.

    float32     all-reduce
    bfloat16    all-to-all, sum in float32, all-gather      half the bytes, one more message

Gloo's and MPI's all-reduce would sum in bfloat16; so what is rounded goes through a codec.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lightning_shard.backends.pending import Pending
from lightning_shard.backends.traffic import ring_share
from lightning_shard.data_parallel.compression.buffer import FlatBuffer
from lightning_shard.data_parallel.compression.compressor import Exchange
from lightning_shard.data_parallel.compression.rounding import BF16
from lightning_shard.layout.flat import build_layout

WireDType = Literal["float32", "bfloat16"]


class VectorAverage:
    """Averages a vector over the ranks, once in each step.

    Args:
        numel: Number of elements of the vector.
        buffer: Buffer whose ranks and device are used; its layout is not.
        dtype: Format of the values on the wire; sums are in float32.

    Attributes:
        values: Shape (numel,), float32: this rank's, and after `wait` the average, the same bits on
            all ranks. Not finite there, unless all ranks' values are.
    """

    def __init__(self, numel: int, buffer: FlatBuffer, dtype: WireDType) -> None:
        self.values = torch.zeros(numel, dtype=torch.float32, device=buffer.device)
        self._ranks, self._dtype = buffer.ranks, dtype
        self._exchange: Exchange | None = None
        if dtype == "bfloat16" and numel:
            layout = build_layout([("values", (numel,))], num_shards=1)
            self._exchange = BF16().exchange(replace(buffer, layout=layout, keeps_all=True))
        self._pending: Pending | Exchange | None = None

    def round_(self, part: Tensor) -> None:
        """Round `part` of this rank's values in place, as the other ranks will get them."""
        if self._dtype == "bfloat16":
            part.copy_(part.bfloat16())

    def begin(self) -> int:
        """Start averaging; each rank must call. Return the bytes that this rank sends in all."""
        if self._exchange is None:
            self._pending = self._ranks.all_reduce(self.values, "avg", async_op=True)
            return 4 * ring_share(2 * self.values.numel(), self._ranks.size)
        sent_before = self._exchange.tally.sent_bytes
        self._exchange.begin(self.values, self.values)
        self._pending = self._exchange
        return 2 * (self._exchange.tally.sent_bytes - sent_before)  # the way back is as long

    def wait(self) -> None:
        """Return once `values` holds the average; each rank must call, in the order of `begin`.

        In bfloat16 the way back begins here.
        """
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
