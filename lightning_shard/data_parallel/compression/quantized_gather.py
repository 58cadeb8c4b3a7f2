"""Parameters that travel in a codec's bytes when their shards are brought together.

    shard, exact ──encode──> row ──all-gather──> rows ──decode──> full, the same on every rank

A rank decodes its own row as well, so that all ranks compute with the same values. The shards stay
what the optimizer has made of them: each gather begins anew from them, and no rounding adds up.
Parameters begin at borders of the codec's blocks, so that none shares a scale with another.
Source: ZeRO++, arXiv:2306.10209, section 3.1.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.pending import Pending
from lightning_shard.core.layout import FlatLayout
from lightning_shard.data_parallel.compression.built_in import Int8
from lightning_shard.data_parallel.compression.codec import form_of, read_row, write_row
from lightning_shard.data_parallel.compression.compressor import Turn

BLOCK = 128  # values that share a scale
QuantizedGathers = Literal["int8"]
_CODECS = {"int8": Int8(block=BLOCK, rounding="nearest")}
_EACH = Turn(step=0, seed=0)  # nearest rounding draws nothing, so that edits can be told from it


class QuantizedGather:
    """Brings the shards of one buffer together in few bits.

    Args:
        kind: Name of the codec.
        layout: The buffer's, in which parameters and shards begin at multiples of `BLOCK`.
        ranks: The ranks that have the shards.
    """

    def __init__(self, kind: QuantizedGathers, layout: FlatLayout, ranks: Collectives) -> None:
        self._codec, self._ranks = _CODECS[kind], ranks
        self._numels = [*layout.shard_numels]
        shapes = {
            numel: self._encode(torch.zeros(numel, device="meta")) for numel in {*self._numels}
        }
        self._forms = [form_of(shapes[numel]) for numel in self._numels]
        self._row: Tensor | None = None  # what the full parameters have of this rank's shard

    @classmethod
    def of(
        cls, kind: QuantizedGathers | None, layout: FlatLayout, ranks: Collectives
    ) -> "QuantizedGather | None":
        """Return one, or None where shards travel as they are."""
        return None if kind is None else cls(kind, layout, ranks)

    @property
    def row_bytes(self) -> int:
        """Bytes that this rank sends to each other one, and keeps until `forget`."""
        return self._forms[self._ranks.rank].num_bytes

    def _encode(self, shard: Tensor) -> Sequence[Tensor]:
        return self._codec.encode(shard.float(), _EACH)

    def begin(self, shard: Tensor, full: Tensor) -> "QuantizedArrival":
        """Start bringing shards, (S,), together in `full`, (F,) of any format; collective."""
        sizes, device = [form.num_bytes for form in self._forms], shard.device
        form = self._forms[self._ranks.rank]
        row = torch.zeros(form.num_bytes, dtype=torch.uint8, device=device)
        write_row(row, form, self._encode(shard), torch.ones((), device=device))
        rows = row.new_empty(sum(sizes))
        pending = self._ranks.all_gather(rows, row, sizes=sizes, async_op=True)
        self._row = row
        return QuantizedArrival(pending, partial(self._decode, torch.split(rows, sizes), full))

    @torch.no_grad()
    def _decode(self, rows: Sequence[Tensor], full: Tensor) -> None:
        for rank, part in enumerate(torch.split(full, self._numels)):
            part.copy_(self._decoded(rows[rank], rank))

    def _decoded(self, row: Tensor, rank: int) -> Tensor:
        return self._codec.decode(read_row(row, self._forms[rank]), self._numels[rank])

    def gathered(self) -> Tensor | None:
        """Return this rank's part of the full parameters as it came, (S,); None if it is gone."""
        return None if self._row is None else self._decoded(self._row, self._ranks.rank)

    def forget(self) -> None:
        """Note that the full parameters are gone."""
        self._row = None


class QuantizedArrival:
    """Parameters on their way, as `Pending` is for what needs no decoding."""

    def __init__(self, pending: Pending, decode: Callable[[], None]) -> None:
        self._pending, self._decode = pending, decode

    def wait(self) -> None:
        """Let the full parameters have their values; once."""
        self._pending.wait()
        self._decode()
