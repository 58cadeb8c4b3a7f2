"""Where each parameter lies in a flat buffer, and which slice of it each rank owns: arithmetic.

Parameters lie one behind the other, each at an aligned offset; the buffer is cut into equal shards,
one per rank, wherever the cuts happen to fall:

    rank              0               1               2
    buffer   |---------------|---------------|---------------|
    slots    [ embed ][  weight  ][ b ][     weight     ]....   . = padding

so that a full parameter, and a rank's shard, is one contiguous view, and reduce-scatter and
all-gather work on the buffer itself. A range of flat elements is 2 N - 1 boxes of an N-D tensor at
the most, each of which is contiguous:

    elements [3, 17) of shape (4, 5)        . . . A A       A   offsets (0, 3)  sizes (1, 2)
                                            B B B B B       B   offsets (1, 0)  sizes (2, 5)
                                            B B B B B
                                            C C . . .       C   offsets (3, 0)  sizes (1, 2)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

from typing_extensions import override

from lightning_shard.errors import LayoutError


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


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The elements of the buffer, from `offset` on, that one parameter takes."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @cached_property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return prod(self.shape)

    @cached_property
    def stop(self) -> int:
        """Index in the buffer one past the parameter's last element."""
        return self.offset + self.numel


@dataclass(frozen=True, kw_only=True)
class ShardSlice:
    """The slice of one parameter that lies in one rank's shard; empty when none of it does.

    Attributes:
        shard_offset: Index of the slice's first element in the rank's shard of the buffer.
        param_offset: Index of the slice's first element in the flattened parameter.
    """

    shard_offset: int
    param_offset: int
    numel: int

    @property
    def shard_stop(self) -> int:
        """Index one past the slice's last element in the rank's shard."""
        return self.shard_offset + self.numel

    @property
    def param_stop(self) -> int:
        """Index one past the slice's last element in the flattened parameter."""
        return self.param_offset + self.numel


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """The slots of one flat buffer and its even split over `num_shards` ranks.

    Attributes:
        slots: Where each parameter lies, in buffer order.
        num_shards: Number of ranks that the buffer is split over.
        shard_numel: Number of elements in each rank's shard, padding included.
    """

    slots: tuple[Slot, ...]
    num_shards: int
    shard_numel: int

    @property
    def full_numel(self) -> int:
        """Number of elements of the whole buffer, padding included."""
        return self.num_shards * self.shard_numel

    @cached_property
    def shard_numels(self) -> tuple[int, ...]:
        """Number of elements of each rank's shard."""
        bounds = map(self.shard_bounds, range(self.num_shards))
        return tuple(stop - start for start, stop in bounds)

    @cached_property
    def part_numels(self) -> tuple[int, ...]:
        """Number of elements of each part of the buffer: padding, slot, padding ... padding."""
        numels, end = [], 0
        for slot in self.slots:
            numels += [slot.offset - end, slot.numel]
            end = slot.stop
        return (*numels, self.full_numel - end)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """First and one-past-last index of each run of padding."""
        ends = list(accumulate(self.part_numels))
        paddings = zip(ends[::2], self.part_numels[::2], strict=True)
        return tuple((end - numel, end) for end, numel in paddings if numel)

    def shard_bounds(self, shard: int) -> tuple[int, int]:
        """Indices in the buffer of a shard's first element and of one past its last."""
        return shard * self.shard_numel, (shard + 1) * self.shard_numel

    def shard_slice(self, slot: Slot, shard: int) -> ShardSlice:
        """The slice of the parameter at `slot` that lies in shard number `shard`."""
        start, stop = self.shard_bounds(shard)
        begin, end = max(slot.offset, start), min(slot.stop, stop)
        if begin >= end:
            return ShardSlice(shard_offset=0, param_offset=0, numel=0)
        return ShardSlice(
            shard_offset=begin - start, param_offset=begin - slot.offset, numel=end - begin
        )

    def shard_slices(self, shard: int) -> Iterator[ShardSlice]:
        """The slice of every slot's parameter in shard number `shard`, in slot order."""
        return (self.shard_slice(slot, shard) for slot in self.slots)


def build_layout(
    shapes: Sequence[tuple[str, tuple[int, ...]]], *, num_shards: int, align: int = 1
) -> FlatLayout:
    """Lay parameters out one behind the other and split the buffer evenly.

    Args:
        shapes: Name and full shape of each parameter, in buffer order.
        num_shards: Number of ranks that share the buffer.
        align: Every slot and every shard begins at a multiple of this many elements.

    Raises:
        LayoutError: No parameters, a repeated name, or a count below one.
    """
    if not shapes or num_shards < 1 or align < 1:
        raise LayoutError(
            f"A flat layout needs at least one parameter, shard and element of alignment, "
            f"got {len(shapes)} parameters, num_shards={num_shards}, align={align}."
        )
    names = [name for name, _ in shapes]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise LayoutError(f"A parameter can lie in a buffer once, got {repeated} several times.")
    slots: list[Slot] = []
    end = 0
    for name, shape in shapes:
        slots.append(Slot(name=name, shape=tuple(shape), offset=_round_up(end, align)))
        end = slots[-1].stop
    shard_numel = max(_round_up(-(-end // num_shards), align), align)
    return FlatLayout(slots=tuple(slots), num_shards=num_shards, shard_numel=shard_numel)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class OwnedLayout(FlatLayout):
    """The slots of one flat buffer that is cut between parameters, each full in its owner's shard.

        sizes, greatest first    8   6   5   3   2      each to the rank that has least so far
        rank 0                   8           3   2
        rank 1                       6   5

        rank              0               1
        buffer   |-------------|-------------------|  cut between parameters: shards differ in size
        slots    [  weight  ][ w ][ weight ][ weight ][w]

    An optimizer of full matrices updates them where they lie. Over all buffers of a model a rank
    has at most 1/N of the elements and one parameter more: when it got its last one, nobody had
    less.

    Attributes:
        cuts: Index in the buffer of each shard's first element, and last its number of elements.
    """

    cuts: tuple[int, ...]

    @property
    @override
    def full_numel(self) -> int:
        """Number of elements of the whole buffer, padding included."""
        return self.cuts[-1]

    @override
    def shard_bounds(self, shard: int) -> tuple[int, int]:
        """Indices in the buffer of a shard's first element and of one past its last."""
        return self.cuts[shard], self.cuts[shard + 1]


def assign_owners(numels: Sequence[int], *, num_ranks: int) -> list[int]:
    """Return an owner of each parameter, such that all own about as much; alike on every rank."""
    owners, held = [0] * len(numels), [0] * num_ranks
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        owners[index] = min(range(num_ranks), key=held.__getitem__)
        held[owners[index]] += numels[index]
    return owners


def build_owned_layout(
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    owners: Sequence[int],
    *,
    num_shards: int,
    align: int = 1,
) -> OwnedLayout:
    """Lay parameters out one behind the other and cut the buffer where the owner changes.

    Arguments and errors are as of `build_layout`, with the rank that owns each parameter,
    ascending.
    """
    even = build_layout(shapes, num_shards=1, align=align)
    if list(owners) != sorted(owners) or len(owners) != len(shapes) or owners[-1] >= num_shards:
        raise LayoutError(
            f"A buffer that is cut between parameters needs an owner of each of its {len(shapes)} "
            f"parameters, from 0 to {num_shards - 1} in ascending order, got {list(owners)}."
        )
    ends, starts = [0] * num_shards, [slot.offset for slot in even.slots]
    for owner, end in zip(owners, [*starts[1:], even.full_numel], strict=True):
        ends[owner] = end
    cuts = (0, *accumulate(ends, max))
    return OwnedLayout(slots=even.slots, num_shards=num_shards, shard_numel=max(ends), cuts=cuts)
