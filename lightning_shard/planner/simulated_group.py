"""A simulated group with one rank, which counts what the rank would send, and sends nothing.

    engine, layers, stages ──> SimulatedCollectives ──> Traffic
                                                          (no process group, no peers)

The code that trains calls it as it calls any group, so the counts are those of a real run.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.pending import StartedTransfer
from lightning_shard.backends.traffic import Traffic

T = TypeVar("T")


class SimulatedCollectives(Collectives):
    """Rank `rank` of `size` ranks that all do what this one does.

    Receiving leaves a tensor as it is: the tensors must have no elements.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.group = cast("dist.ProcessGroup", None)
        self.rank, self.size = rank, size
        self.traffic = Traffic()

    def duplicate(self, timeout: timedelta | None = None) -> Self:
        """Return this group, in which no operation is ever in flight."""
        return self

    def barrier(self) -> None:
        """Return at once."""

    def all_gather_object(self, obj: T) -> list[T]:
        """Return a list with the object once for each rank."""
        return [obj] * self.size

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Return the object itself, whichever rank is the source."""
        return obj

    def _start_nothing(self, *_: Any) -> StartedTransfer:
        return StartedTransfer()

    _all_reduce = _reduce_scatter = _all_gather = cast(Any, _start_nothing)
    _all_to_all = _broadcast = cast(Any, _start_nothing)

    def send_all(self, tensors: Sequence[Tensor]) -> None:
        """Count one message for each tensor."""
        for tensor in tensors:
            self.traffic.count("send", tensor.numel(), tensor.itemsize)
