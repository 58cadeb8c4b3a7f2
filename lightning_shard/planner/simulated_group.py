"""A group of ranks of which one is here: it counts what that rank would send, and moves nothing.

    engine, layers, stages ──> SimulatedCollectives ──> Traffic
                                                          (no process group, no peers)

The code that trains calls it as it calls any group, so that what is counted is what it would send.
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

    What is received is left as it is: the tensors are to have no elements.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.group = cast("dist.ProcessGroup", None)
        self.rank, self.size = rank, size
        self.traffic = Traffic()

    def duplicate(self, timeout: timedelta | None = None) -> Self:
        """Return this group: nothing is in flight that could get in the way."""
        return self

    def barrier(self) -> None:
        """Return at once."""

    def all_gather_object(self, obj: T) -> list[T]:
        """Return the object as often as there are ranks."""
        return [obj] * self.size

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Return the object."""
        return obj

    def _all_reduce(self, *_: Any) -> StartedTransfer:
        return StartedTransfer()

    def _reduce_scatter(self, *_: Any) -> StartedTransfer:
        return StartedTransfer()

    def _all_gather(self, *_: Any) -> StartedTransfer:
        return StartedTransfer()

    def _all_to_all(self, *_: Any) -> StartedTransfer:
        return StartedTransfer()

    def _broadcast(self, *_: Any) -> StartedTransfer:
        return StartedTransfer()

    def send_all(self, tensors: Sequence[Tensor]) -> None:
        """Count one message for each tensor."""
        for tensor in tensors:
            self.traffic.count("send", tensor.numel(), tensor.itemsize)
