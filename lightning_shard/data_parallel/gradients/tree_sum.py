"""The sum over a step's micro-batches in one order, whichever ranks have computed them.

    micro-batch   0   1   2   3   4   5   6   7      neighbours are added first: what is added to
                  └─+─┘   └─+─┘   └─+─┘   └─+─┘      what follows from the numbers alone
                    └───+───┘       └───+───┘
                        └───────+───────┘

    stages 0, 1   rank r has 2^k neighbours, adds them up, and sends one sum with the last of them
    stages 2, 3   rank r has micro-batches r, r + N ...: each travels when it is complete, to the
                  rank that keeps the shard, which adds them up; under hybrid sharding those of
                  each copy's 2^k neighbours first

    pipelines    each rank adds up the microbatches of a batch as their backwards end, whichever
                 is the first; batches then count as micro-batches do

Neighbours are added as soon as both are there. Micro-batches come in the order of their numbers, or
from the last to the first, so that one partial sum for each level is held: log2 of their number.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.backends.pending import Pending
from lightning_shard.backends.rank_order import is_narrow
from lightning_shard.data_parallel.compression.compressor import Exchange, FlatBuffer
from lightning_shard.data_parallel.data_groups import DataGroups

_ALIGN = 64  # elements, so that a rank's part of a full buffer begins where vectors do


class TreeSum:
    """Adds numbered tensors in one order, in fp32 where they are narrower."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], Tensor] = {}  # sums of so many; which of these it is
        self.count = 0

    def push(self, part: Tensor, count: int = 1, *, is_lent: bool = False) -> None:
        """Take the next one, or the sum of so many; one that `is_lent` is not kept, nor written."""
        self.put(self.count // count, part, count, is_lent=is_lent)

    def put(self, number: int, part: Tensor, count: int = 1, *, is_lent: bool = False) -> None:
        """Take that of a number, or of so many as all others are of; see `push`."""
        self.count += count
        if is_narrow(part.dtype):
            part, is_lent = part.float(), False
        while (neighbour := self._parts.pop((count, number ^ 1), None)) is not None:
            part, is_lent = neighbour.add_(part), False
            number, count = number // 2, 2 * count
        self._parts[count, number] = part.clone() if is_lent else part

    def take(self) -> Tensor:
        """Return the sum of all, and begin anew."""
        total, *before = (self._parts[one] for one in sorted(self._parts))  # the last is the least
        self._parts, self.count = {}, 0
        for part in before:
            total = part.add_(total)
        return total

    @property
    def held(self) -> list[Tensor]:
        """The partial sums that are held now."""
        return [*self._parts.values()]


class TreeExchange(Exchange):
    """Averages one buffer over the micro-batches of a step.

    Attributes:
        ends_step: Whether what begins to travel is the last of a step on this rank.
        num_micro_batches: How many a step has on all ranks; those beyond them count for nothing.
        divisor: What the sum of all is divided by; None for their number.
    """

    ends_step = True
    num_micro_batches: int | None = None
    divisor: int | None = None

    def __init__(self, buffer: FlatBuffer, groups: DataGroups) -> None:
        super().__init__(buffer)
        self.sends_twice = buffer.keeps_all
        self._ranks = groups.dp if buffer.keeps_all else groups.shard
        self._copies = None if buffer.keeps_all else groups.replicate
        self._own, self._all = TreeSum(), TreeSum()
        self._num_own = 1
        self._sizes = self._parts_of_ranks()
        self._came: list[Tensor] = []
        self._of_copies: list[Tensor] = []  # under hybrid sharding
        self._out = torch.empty(0)
        self._first: Pending | None = None
        self._second: Pending | None = None

    def _parts_of_ranks(self) -> list[int]:
        """Return how many elements each rank adds up."""
        layout, size = self.buffer.layout, self._ranks.size
        if not self.buffer.keeps_all:
            return list(layout.shard_numels)
        part = -(-layout.full_numel // (size * _ALIGN)) * _ALIGN
        begins = [min(rank * part, layout.full_numel) for rank in range(size + 1)]
        return [stop - start for start, stop in pairwise(begins)]

    @property
    def _own_part(self) -> slice:
        start = sum(self._sizes[: self._ranks.rank])
        return slice(start, start + self._sizes[self._ranks.rank])

    @property
    @override
    def kept(self) -> list[Tensor]:
        return [*self._own.held, *self._all.held]

    def add(self, values: Tensor) -> None:
        """Add a micro-batch of this rank to its others, which travel with the last of the step."""
        self._own.push(values, is_lent=True)

    @override
    def begin(self, values: Tensor, out: Tensor, used: Sequence[bool] | None = None) -> None:
        if self._own.count:
            self._own.push(values)
            self._num_own = self._own.count
            values = self._own.take()
        else:
            self._num_own = 1
        self._out, size = out, self._ranks.size
        if size == 1:
            self._came = [values]
            return
        received = values.new_empty(size * self._sizes[self._ranks.rank])
        splits = [self._sizes[self._ranks.rank]] * size
        self._first = self._ranks.all_to_all(
            received,
            values,
            output_split_sizes=splits,
            input_split_sizes=self._sizes,
            async_op=True,
        )
        self._came = list(torch.split(received, splits))

    @override
    def proceed(self) -> None:
        if not self._came:
            return
        if self._first is not None:
            self._first.wait()
            self._first = None
        came, self._came = self._came, []
        if self._copies is None:
            most = self.num_micro_batches or self._all.count + len(came)
            self._take(came[: most - self._all.count], 1)
            return
        of_copy = TreeSum()
        for part in came:
            of_copy.push(part)
        own = of_copy.take()
        gathered = own.new_empty(self._copies.size * own.numel())
        self._second = self._copies.all_gather(gathered, own, async_op=True)
        self._of_copies = list(gathered.chunk(self._copies.size))

    def _take(self, came: Sequence[Tensor], count: int) -> None:
        """Add sums of so many ranks each to those of earlier micro-batches of the step."""
        for part in came:
            self._all.push(part, count, is_lent=not self.ends_step)
        if self.ends_step:
            self._finish()

    def _finish(self) -> None:
        divisor = self.divisor or self._all.count * self._num_own
        own = self._out[self._own_part] if self.buffer.keeps_all else self._out
        own.copy_(self._all.take().div_(divisor))
        if self.buffer.keeps_all and self._ranks.size > 1:
            self._second = self._ranks.all_gather(self._out, own, sizes=self._sizes, async_op=True)

    @override
    def wait(self) -> None:
        self.proceed()
        if self._second is not None:
            self._second.wait()
            self._second = None
        if self._of_copies:
            of_copies, self._of_copies = self._of_copies, []
            self._take(of_copies, self._ranks.size)

    @override
    def load(self, state: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Take over nothing: a step begins anew."""
