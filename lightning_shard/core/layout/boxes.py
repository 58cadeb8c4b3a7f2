"""Boxes of an N-D tensor: a range of its flat elements as a few of them, and a box cut in blocks.

    elements [3, 17) of shape (4, 5)        . . . A A       A   offsets (0, 3)  sizes (1, 2)
                                            B B B B B       B   offsets (1, 0)  sizes (2, 5)
                                            B B B B B
                                            C C . . .       C   offsets (3, 0)  sizes (1, 2)

A range takes 2 N - 1 boxes at the most, each of which is contiguous in the flat tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """An axis-aligned part of a tensor: by dimension its first index and its number of elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)


@dataclass(frozen=True)
class PlacedBox:
    """A part `local` of a rank's own tensor, and the offsets at which it lies in the full one."""

    local: Box
    offsets: tuple[int, ...]

    @property
    def full(self) -> Box:
        """The part, in the full tensor."""
        return Box(self.offsets, self.local.sizes)


def whole(shape: Sequence[int]) -> Box:
    """Return the box of all elements."""
    return Box((0,) * len(shape), tuple(shape))


def boxes_of_range(start: int, stop: int, shape: Sequence[int]) -> Iterator[Box]:
    """Yield the boxes of the elements [start, stop) of a flat tensor, in its order."""
    while start < stop:
        box = _longest(start, stop, tuple(shape))
        yield box
        start += box.numel


def _longest(start: int, stop: int, shape: tuple[int, ...]) -> Box:
    """Return the largest box that begins at `start` and ends before `stop`."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offsets = tuple(start // stride % size for stride, size in zip(strides, shape, strict=True))
    for dim, stride in enumerate(strides):
        fits = min((stop - start) // stride, shape[dim] - offsets[dim])
        if start % stride == 0 and fits:
            return Box(offsets, (1,) * dim + (fits,) + shape[dim + 1 :])
    return Box(offsets, (1,) * len(shape))


def intersection(one: Box, other: Box) -> Box | None:
    """Return the elements that lie in both boxes; None where there are none."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    stops = [
        min(a + size, b + other_size)
        for a, size, b, other_size in zip(
            one.offsets, one.sizes, other.offsets, other.sizes, strict=True
        )
    ]
    sizes = tuple(stop - start for start, stop in zip(offsets, stops, strict=True))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


def placed_in(box: Box, places: Sequence[PlacedBox]) -> Iterator[PlacedBox]:
    """Yield the parts of a box of a rank's own tensor, each where it lies in the full one."""
    for place in places:
        common = intersection(box, place.local)
        if common is not None:
            moved = zip(common.offsets, place.local.offsets, place.offsets, strict=True)
            yield PlacedBox(common, tuple(at - local + full for at, local, full in moved))
