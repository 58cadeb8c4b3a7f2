"""What a rank sent, counted per operation under the ring model.

The counts say what a bandwidth-optimal ring would send, whatever algorithm moved the bytes, so that
they compare between backends and with the figures of arXiv:1910.02054. Of n elements on N ranks,
each rank sends:

    all_reduce                          2n(N-1)/N
    reduce_scatter (n input elements)    n(N-1)/N
    all_gather (n output elements)       n(N-1)/N
    broadcast                            n          (0 on a single rank)
    all_to_all                           everything but its own split
    send                                 n
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OperationTraffic:
    """What one operation has cost this rank so far.

    Attributes:
        calls: How often this rank called it.
        elements: Elements sent, ring model, each call rounded up.
        bytes: The same in bytes of the type on the wire.
        seconds: Time in which this rank could do nothing else: starting, waiting, local sums.
    """

    calls: int = 0
    elements: int = 0
    bytes: int = 0
    seconds: float = 0.0


_NOTHING = OperationTraffic()


class Traffic(Mapping[str, OperationTraffic]):
    """Counters of one `Collectives`, by operation name; an unused operation counts zero."""

    def __init__(self) -> None:
        self._operations: dict[str, OperationTraffic] = {}

    def __getitem__(self, operation: str) -> OperationTraffic:
        return self._operations.get(operation, _NOTHING)

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

    @property
    def total_seconds(self) -> float:
        """Seconds spent in all operations."""
        return sum(one.seconds for one in self._operations.values())

    def count(self, operation: str, elements: int, element_bytes: int) -> None:
        """Add one call that sends `elements` of `element_bytes` bytes each."""
        before = self[operation]
        self._operations[operation] = OperationTraffic(
            calls=before.calls + 1,
            elements=before.elements + elements,
            bytes=before.bytes + elements * element_bytes,
            seconds=before.seconds,
        )

    def spend(self, operation: str, seconds: float) -> None:
        """Add time spent in `operation`."""
        before = self[operation]
        self._operations[operation] = OperationTraffic(
            calls=before.calls,
            elements=before.elements,
            bytes=before.bytes,
            seconds=before.seconds + seconds,
        )

    def reset(self) -> None:
        """Set every counter to zero."""
        self._operations.clear()

    def snapshot(self) -> dict[str, OperationTraffic]:
        """Return a copy that later operations do not change."""
        return dict(self._operations)


def ring_share(numel: int, size: int) -> int:
    """Return the elements that a rank of a ring sends in one pass over `numel` elements.

    Args:
        numel: Elements of the full tensor.
        size: Ranks in the group.

    Returns:
        numel * (size - 1) / size, rounded up.
    """
    return -(-numel * (size - 1) // size)
