"""Full tensors that arrive on the rank that writes them, part by part, from ranks with slices.

    rank 0   own slice ──────────────────────> part, part ─┐
    rank 1   slices ──packed──> message ─────> part ───────┼──> who writes
    rank 2   slices ──packed──> message ─────> part ───────┘

A message is full whatever tensors begin or end in it, and the next ones are on their way while rank
0 writes: it holds a few messages, not a unit, and the other ranks two of their own.
"""

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.backends.pending import Pending
from lightning_shard.checkpoint.files.torch_archive import PART_BYTES
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.flat_parameters import FlatParameters
from lightning_shard.data_parallel.model_split import ranks_of

ARRIVING_BYTES = 4 << 20  # on rank 0, of all peers together
_FEWEST_BYTES = 256 << 10  # of a message, since each takes its time
_AHEAD = 2  # messages of a peer on their way, next to the one that is being read


class SlicedTensor(NamedTuple):
    """A full tensor cut over a group's ranks, in order; `own` is None for zeros, or nothing."""

    shape: Sequence[int]
    dtype: torch.dtype
    numels: Sequence[int]
    own: Tensor | None


class ArrivingTensor:
    """A full tensor, only good until the next one is asked for, as is each part of it."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        parts: Iterator[Tensor],
        device: torch.device,
    ) -> None:
        self.shape, self.dtype, self.parts = torch.Size(shape), dtype, parts
        self._device = device

    @classmethod
    def here(cls, tensor: Tensor) -> "ArrivingTensor":
        """Return a tensor that is here already, and stays good."""
        tensor = tensor.detach()
        return cls(tensor.shape, tensor.dtype, _parts_of_slice(tensor), tensor.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.dtype.itemsize

    def tensor(self) -> Tensor:
        """Return all of it, in memory of its own."""
        full = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
        done = 0
        for part in self.parts:
            full[done : done + part.numel()].copy_(part)
            done += part.numel()
        return full.view(self.dtype).view(self.shape)


@torch.no_grad()
def arriving(
    tensors: Sequence[SlicedTensor], group: Collectives, device: torch.device
) -> Iterator[ArrivingTensor]:
    """Bring tensors to rank 0 of a group, which alone gets their elements; each rank must run."""
    if group.rank == 0:
        yield from _received(tensors, group, device)
    else:
        yield from _sent(tensors, group, device)


def arriving_of(
    params: Sequence[nn.Parameter],
    sliced: Callable[[int, Collectives], SlicedTensor | None],
    alone: Callable[[int], Tensor],
    engine: DataParallelEngine,
) -> Iterator[tuple[int, ArrivingTensor]]:
    """Bring a tensor of each parameter to the rank that writes, with its number; each must call.

    `sliced` returns what lies on ranks of a group; where that is None, `alone` what is here.
    """
    every = [ranks_of(param, engine.groups, engine.split) for param in params]
    # A message holds neighbours with the same group alone: a rank may have to exchange one tensor
    # with ranks of its group before it comes to the next of another group.
    for group, numbers in groupby(range(len(params)), key=lambda number: every[number].shard):
        slices = {number: sliced(number, group) for number in numbers}
        coming = arriving([one for one in slices.values() if one is not None], group, engine.device)
        for number, one in slices.items():
            full = ArrivingTensor.here(alone(number)) if one is None else next(coming)
            param = params[number]
            is_spread = bool(engine.split.groups) and engine.split.is_spread(param)
            if is_spread and every[number].dp.rank == 0:
                full = ArrivingTensor.here(engine.split.full(param, full.tensor()))
            if engine.is_first:
                yield number, full
        for _ in coming:  # to its end
            pass


def _received(
    tensors: Sequence[SlicedTensor], group: Collectives, device: torch.device
) -> Iterator[ArrivingTensor]:
    inboxes = [
        _Inbox(group, peer, _num_bytes(tensors, peer), device) for peer in range(1, group.size)
    ]
    for one in tensors:
        parts = _parts(one, inboxes, device)
        yield ArrivingTensor(one.shape, one.dtype, parts, device)
        for inbox in inboxes:
            if inbox.failure is not None:  # who writes has met with it; nothing more comes
                raise inbox.failure
        for _ in parts:  # nobody has looked at them
            pass


def _parts(
    one: SlicedTensor, inboxes: Sequence["_Inbox"], device: torch.device
) -> Iterator[Tensor]:
    yield from _own_parts(one, 0, device)
    for inbox, numel in zip(inboxes, one.numels[1:], strict=True):
        yield from inbox.take(numel * one.dtype.itemsize)


def _sent(
    tensors: Sequence[SlicedTensor], group: Collectives, device: torch.device
) -> Iterator[ArrivingTensor]:
    outbox = _Outbox(group, _num_bytes(tensors, group.rank), device)
    for one in tensors:
        for part in _own_parts(one, group.rank, device):
            outbox.put(part)
        yield ArrivingTensor(one.shape, one.dtype, iter(()), device)
    outbox.finish()


def _num_bytes(tensors: Sequence[SlicedTensor], rank: int) -> int:
    return sum(one.numels[rank] * one.dtype.itemsize for one in tensors)


def _own_parts(one: SlicedTensor, rank: int, device: torch.device) -> Iterator[Tensor]:
    if one.own is not None:
        return _parts_of_slice(one.own.to(one.dtype))
    return _zeros(one.numels[rank] * one.dtype.itemsize, device)


def _parts_of_slice(own: Tensor) -> Iterator[Tensor]:
    flat = own.detach().reshape(-1).view(torch.uint8)
    if flat.is_cpu:
        yield flat
        return
    yield from torch.split(flat, PART_BYTES)


def _zeros(num_bytes: int, device: torch.device) -> Iterator[Tensor]:
    zeros = torch.zeros(min(num_bytes, PART_BYTES), dtype=torch.uint8, device=device)
    for begin in range(0, num_bytes, PART_BYTES):
        yield zeros[: num_bytes - begin]


def _message_sizes(num_bytes: int, group: Collectives) -> list[int]:
    """Return the bytes of each message of a peer's, the same there and on rank 0."""
    size = max(ARRIVING_BYTES // (_AHEAD + 1) // max(group.size - 1, 1), _FEWEST_BYTES)
    return [min(size, num_bytes - begin) for begin in range(0, num_bytes, size)]


class _Inbox:
    """What one peer sends, in order; receives are posted ahead."""

    failure: Exception | None = None

    def __init__(self, group: Collectives, peer: int, num_bytes: int, device: torch.device) -> None:
        self._group, self._peer = group, peer
        self._sizes = deque(_message_sizes(num_bytes, group))
        self._coming: deque[tuple[Pending, Tensor]] = deque()
        for _ in range(min(_AHEAD + 1, len(self._sizes))):
            self._post(torch.empty(self._sizes[0], dtype=torch.uint8, device=device))
        self._at = 0
        self._message = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, num_bytes: int) -> Iterator[Tensor]:
        """Yield the next bytes, each part only good until the next one is asked for."""
        while num_bytes:
            if self._at == self._message.numel():
                self._next()
            part = self._message[self._at : self._at + num_bytes]
            self._at += part.numel()
            num_bytes -= part.numel()
            yield part

    def _next(self) -> None:
        if self._message.numel():
            self._post(self._message)
        pending, message = self._coming.popleft()
        try:
            pending.wait()
        except Exception as error:
            self.failure = error
            raise
        self._message, self._at = message, 0

    def _post(self, buffer: Tensor) -> None:
        if self._sizes:
            target = buffer[: self._sizes.popleft()]
            self._coming.append((self._group.recv(target, self._peer, async_op=True), target))


class _Outbox:
    """What goes to rank 0, in messages that are on their way while the next is packed."""

    def __init__(self, group: Collectives, num_bytes: int, device: torch.device) -> None:
        self._group, self._device = group, device
        self._sizes = deque(_message_sizes(num_bytes, group))
        self._going: deque[tuple[Pending, Tensor]] = deque()
        self._used = 0
        self._message = self._new()

    def put(self, data: Tensor) -> None:
        """Send some bytes: uint8, 1-D."""
        done = 0
        while done < data.numel():
            part = data[done : done + self._message.numel() - self._used]
            self._message[self._used : self._used + part.numel()].copy_(part)
            self._used += part.numel()
            done += part.numel()
            if self._used == self._message.numel():
                self._send()

    def finish(self) -> None:
        """Wait until all has been sent."""
        while self._going:
            self._going.popleft()[0].wait()

    def _send(self) -> None:
        sending = self._group.send(self._message, 0, async_op=True)
        self._going.append((sending, self._message))
        self._message, self._used = self._new(), 0

    def _new(self) -> Tensor:
        """Return memory for the next message: that of the last but one, once it is sent."""
        size = self._sizes.popleft() if self._sizes else 0
        if len(self._going) < _AHEAD:
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        sending, buffer = self._going.popleft()
        sending.wait()
        return buffer[:size]


def full_parameters(
    engine: DataParallelEngine, *, without: Container[nn.Parameter] = ()
) -> Iterator[tuple[nn.Parameter, ArrivingTensor]]:
    """Bring the model's parameters together on rank 0; each rank must run through it."""
    engine.adopt_assigned()
    if not engine.groups.is_first_copy:
        return
    params = [param for param in engine.model.parameters() if param not in without]
    held = {param for flat in engine.flats for param in flat.params}
    take_in_edits(engine)

    def sliced(number: int, ranks: Collectives) -> SlicedTensor | None:
        return _sliced(params[number], engine, ranks) if params[number] in held else None

    for number, full in arriving_of(params, sliced, lambda at: params[at].data, engine):
        yield params[number], full


def take_in_edits(engine: DataParallelEngine) -> None:
    """Let shards have what user code has assigned to parameters, or edited while they were full."""
    for flat in engine.flats:
        flat.see_assigned()
        if flat.is_unsharded:
            flat.take_in_edits()
        flat.settle()


def _sliced(param: nn.Parameter, engine: DataParallelEngine, ranks: Collectives) -> SlicedTensor:
    flat, index = engine.owner(param)
    if flat.reshards or flat.is_rounded:
        return slices_of(flat, index, flat.master_views[index], flat.master_dtype, ranks)
    full = flat.full_views[index]  # here anyway
    numels = [full.numel(), *[0] * (ranks.size - 1)]
    return SlicedTensor(full.shape, full.dtype, numels, full if ranks.rank == 0 else None)


def slices_of(
    flat: FlatParameters,
    index: int,
    own: Tensor | None,
    dtype: torch.dtype,
    ranks: Collectives,
    *,
    elements: int = 1,
) -> SlicedTensor:
    """Return a tensor cut as a parameter is, with an element for so many of the parameter's."""
    slot, shards = flat.layout.slots[index], range(flat.layout.num_shards)
    numels = [-(-flat.layout.shard_slice(slot, shard).numel // elements) for shard in shards]
    numels += [0] * (ranks.size - len(numels))  # one rank stands for all that have everything
    has_slice = own is not None and numels[ranks.rank] > 0
    shape = slot.shape if elements == 1 else (sum(numels),)
    return SlicedTensor(shape, dtype, numels, own if has_slice else None)
