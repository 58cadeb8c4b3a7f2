"""Counters of what a rank has sent, per operation, under the ring model.

The counts say what a bandwidth-optimal ring would send, so that they compare between backends and
with the figures of arXiv:1910.02054. Of n elements on N ranks, each rank sends:

    all_reduce                          2n(N-1)/N
    reduce_scatter (n input elements)    n(N-1)/N
    all_gather (n output elements)       n(N-1)/N
    broadcast                            n          (0 on a single rank)
    all_to_all                           everything but its own split
    send                                 n
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(slots=True, kw_only=True)
class OperationTraffic:
    """Counters of one operation of this rank so far.

    Attributes:
        elements: Number of elements sent under the ring model, each call rounded up.
        bytes: Number of bytes sent, at the width of the type on the wire.
        seconds: Time in which this rank could do nothing else: starting, waiting, local sums.
        seconds_waited: The part of `seconds` in which this rank waited for data from its peers,
            which more overlap or a faster network would save.
    """

    calls: int = 0
    elements: int = 0
    bytes: int = 0
    seconds: float = 0.0
    seconds_waited: float = 0.0

    def __add__(self, other: "OperationTraffic") -> "OperationTraffic":
        return self._with(operator.add, other)

    def __sub__(self, other: "OperationTraffic") -> "OperationTraffic":
        return self._with(operator.sub, other)

    def _with(
        self, compute: Callable[[Any, Any], Any], other: "OperationTraffic"
    ) -> "OperationTraffic":
        names = [one.name for one in fields(self)]
        return OperationTraffic(**{n: compute(getattr(self, n), getattr(other, n)) for n in names})


_NOTHING = OperationTraffic()

# What `Collectives` counts.
OPERATIONS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
    "barrier",
    "all_gather_object",
    "broadcast_object",
)


@dataclass(frozen=True, kw_only=True)
class GroupTraffic:
    """Counters of this rank within one group."""

    name: str
    ranks: tuple[int, ...]
    traffic: Mapping[str, OperationTraffic]


class Traffic(Mapping[str, OperationTraffic]):
    """Counters of one `Collectives`, by operation name; an unused operation counts zero.

    A counter that is read is a copy, which later operations do not change.
    """

    def __init__(self) -> None:
        self._operations: dict[str, OperationTraffic] = {}

    def __getitem__(self, operation: str) -> OperationTraffic:
        return replace(self._operations.get(operation, _NOTHING))

    def __contains__(self, operation: object) -> bool:
        return operation in self._operations

    def __iter__(self) -> Iterator[str]:
        return iter(self._operations)

    def __len__(self) -> int:
        return len(self._operations)

    @property
    def total_elements(self) -> int:
        """Elements sent by all operations."""
        return sum(one.elements for one in self._operations.values())

    @property
    def total_bytes(self) -> int:
        """Bytes sent by all operations."""
        return sum(one.bytes for one in self._operations.values())

    def count(self, operation: str, elements: int, element_bytes: int) -> None:
        """Add one call that sends `elements` of `element_bytes` bytes each."""
        own = self._own(operation)
        own.calls += 1
        own.elements += elements
        own.bytes += elements * element_bytes

    def spend(self, operation: str, seconds: float, *, waited: float = 0.0) -> None:
        """Add time spent in `operation`, `waited` seconds of it for data to arrive."""
        own = self._own(operation)
        own.seconds += seconds
        own.seconds_waited += waited

    def add(self, operation: str, more: OperationTraffic) -> None:
        """Add `more` to the counters of `operation`."""
        self._operations[operation] = self[operation] + more

    def reset(self) -> None:
        """Set every counter to zero."""
        self._operations.clear()

    def snapshot(self) -> dict[str, OperationTraffic]:
        """Return a copy of the counters that later operations do not change."""
        return dict(self)

    def _own(self, operation: str) -> OperationTraffic:
        own = self._operations.get(operation)
        if own is None:
            own = self._operations[operation] = OperationTraffic()
        return own


def ring_share(numel: int, size: int) -> int:
    """Return what a rank of a ring sends in one pass: numel * (size - 1) / size, rounded up."""
    return -(-numel * (size - 1) // size)
