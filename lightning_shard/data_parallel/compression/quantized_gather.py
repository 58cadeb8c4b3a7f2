"""Parameters that travel in a codec's bytes when their shards are brought together.

    shard, exact ──encode──> row ──all-gather──> rows ──decode──> full, the same on every rank

A rank decodes its own row as well, so that all ranks compute with the same values. The shards stay
what the optimizer has made of them: each gather begins anew from them, and no rounding adds up.
Parameters begin at borders of the codec's blocks, so that none shares a scale with another.
Source: ZeRO++, arXiv:2306.10209, section 3.1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.pending import Pending
from lightning_shard.core.layout import FlatLayout
from lightning_shard.data_parallel.compression.built_in import Int8
from lightning_shard.data_parallel.compression.codec import form_of, read_row, write_row
from lightning_shard.data_parallel.compression.compressor import Turn

BLOCK = 128  # values that share a scale
QuantizedGathers = Literal["int8"]
GatherDType = Literal["float8"]
_CODECS = {"int8": Int8(block=BLOCK, rounding="nearest")}
_EACH = Turn(step=0, seed=0)  # nearest rounding draws nothing, so that edits can be told from it


class ShardCodec(ABC):
    """Makes the shards of one buffer smaller, each by itself.

    Attributes:
        align: Parameters and shards begin at multiples of so many elements.
    """

    align = 1

    @abstractmethod
    def form(self, numel: int) -> Sequence[Tensor]:
        """Return what a shard of so many elements becomes, on meta."""

    @abstractmethod
    def encode(self, shard: Tensor, tables: Any) -> Sequence[Tensor]:
        """Make this rank's shard, (S,), smaller, by what `tables` returned."""

    @abstractmethod
    def decode(self, fields: Sequence[Tensor], rank: int, numel: int, tables: Any) -> Tensor:
        """Make the shard of a rank, (numel,), of what `encode` returned there, by equal tables."""

    def tables(self) -> Any:
        """Return what all ranks know of all shards before they are encoded; collective."""
        return None

    def forget(self) -> None:
        """Note that shards may have changed, which is nothing to a codec without tables."""
        return


class BlockCodec(ShardCodec):
    """Makes shards smaller in blocks, with a codec that gradients have, too."""

    align = BLOCK

    def __init__(self, kind: QuantizedGathers) -> None:
        self._codec = _CODECS[kind]

    @override
    def form(self, numel: int) -> Sequence[Tensor]:
        return self.encode(torch.zeros(numel, device="meta"), None)

    @override
    def encode(self, shard: Tensor, tables: Any) -> Sequence[Tensor]:
        return self._codec.encode(shard.float(), _EACH)

    @override
    def decode(self, fields: Sequence[Tensor], rank: int, numel: int, tables: Any) -> Tensor:
        return self._codec.decode(fields, numel)


class QuantizedGather:
    """Brings the shards of one buffer together in few bits.

    Args:
        codec: Makes shards smaller.
        layout: The buffer's, in which parameters and shards begin where the codec wants it.
        ranks: The ranks that have the shards.
    """

    def __init__(self, codec: ShardCodec, layout: FlatLayout, ranks: Collectives) -> None:
        self.codec, self._ranks = codec, ranks
        self._numels = [*layout.shard_numels]
        shapes = {numel: codec.form(numel) for numel in {*self._numels}}
        self._forms = [form_of(shapes[numel]) for numel in self._numels]
        self._row: Tensor | None = None  # what the full parameters have of this rank's shard
        self._tables: Any = None  # by which it was encoded

    @classmethod
    def of(
        cls, codec: ShardCodec | None, layout: FlatLayout, ranks: Collectives
    ) -> "QuantizedGather | None":
        """Return one, or None where shards travel as they are."""
        return None if codec is None else cls(codec, layout, ranks)

    @property
    def row_bytes(self) -> int:
        """Bytes that this rank sends to each other one, and keeps until `forget`."""
        return self._forms[self._ranks.rank].num_bytes

    def begin(self, shard: Tensor, full: Tensor) -> "QuantizedArrival":
        """Start bringing shards, (S,), together in `full`, (F,) of any format; collective."""
        sizes, device = [form.num_bytes for form in self._forms], shard.device
        form, tables = self._forms[self._ranks.rank], self.codec.tables()
        row = torch.zeros(form.num_bytes, dtype=torch.uint8, device=device)
        fields = self.codec.encode(shard, tables)
        write_row(row, form, fields, torch.ones((), device=device))
        rows = row.new_empty(sum(sizes))
        pending = self._ranks.all_gather(rows, row, sizes=sizes, async_op=True)
        self._row, self._tables = row, tables
        decode = partial(self._decode, torch.split(rows, sizes), full, tables)
        return QuantizedArrival(pending, decode)

    @torch.no_grad()
    def _decode(self, rows: Sequence[Tensor], full: Tensor, tables: Any) -> None:
        for rank, part in enumerate(torch.split(full, self._numels)):
            part.copy_(self._decoded(rows[rank], rank, tables))

    def _decoded(self, row: Tensor, rank: int, tables: Any) -> Tensor:
        fields = read_row(row, self._forms[rank])
        return self.codec.decode(fields, rank, self._numels[rank], tables)

    def gathered(self) -> Tensor | None:
        """Return this rank's part of the full parameters as it came, (S,); None if it is gone."""
        rank = self._ranks.rank
        return None if self._row is None else self._decoded(self._row, rank, self._tables)

    def forget(self) -> None:
        """Note that the full parameters are gone."""
        self._row = self._tables = None


class QuantizedArrival:
    """Parameters on their way, as `Pending` is for what needs no decoding."""

    def __init__(self, pending: Pending, decode: Callable[[], None]) -> None:
        self._pending, self._decode = pending, decode

    def wait(self) -> None:
        """Let the full parameters have their values; once."""
        self._pending.wait()
        self._decode()
