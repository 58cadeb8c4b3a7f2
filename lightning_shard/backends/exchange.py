"""Collectives made of point-to-point messages, for Gloo and MPI.

Gloo's own reduce-scatter is an all-reduce inside and sums bf16 in bf16; its all-to-all sends one
way at a time. Here every rank sends each peer just the slice that the peer needs:

    reduce-scatter                          all-gather
    rank 0  [a0|a1] ──a1──> rank 1          rank 0  [x0|..] ──x0──> rank 1
    rank 1  [b0|b1] ──b0──> rank 0          rank 1  [..|x1] ──x1──> rank 0
    then  rank 0: a0+b0   rank 1: a1+b1     each slice lands where it belongs

`Pending.wait` sums, in rank order. Every operation is a single phase: a second round of messages
that begins in `wait` would deadlock two ranks that wait for two operations in different order. So
an all-reduce is either direct, the full tensor to every peer, or the backend's own (Gloo's ring).
"""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.backends.collectives import Collectives, copy_unless_same
from lightning_shard.backends.free_memory import LARGEST_BLOCK_BYTES
from lightning_shard.backends.pending import StartedTransfer
from lightning_shard.backends.rank_order import ReduceOpName, combine_in_rank_order, is_narrow
from lightning_shard.backends.shapes import FIRST_RESERVED_TAG

# An all-reduce that sends the full tensor to every peer beats Gloo's ring up to here on any number
# of ranks (latency) ...
_DIRECT_BYTES = 64 << 10
# ... and up to here on so few ranks that it sends less than the ring, or as much of a tensor of
# some size; the buffer is as large again for each peer. In between, at 128 KB, a training step of
# two ranks on two busy cores took 1.7 times as long by the direct way (torch 2.13).
_DIRECT_BYTES_OF_FEW = 64 << 20
_DIRECT_BYTES_OF_AS_MUCH = 4 << 20
IDLE_LIMIT_BYTES = 64 << 20  # one operation of the collectives' benchmark


class ScratchPool:
    """Idle host buffers, each lent to one operation at a time.

    A fresh buffer costs its page faults: a 64 MB reduce-scatter between two Gloo ranks took 49 ms
    with a new buffer for each call and 20 ms with a kept one (torch 2.13). What the C library keeps
    when it is freed (`free_memory.py`) goes back to it; larger ones are kept here, up to a limit.
    """

    def __init__(
        self, smallest_bytes: int = LARGEST_BLOCK_BYTES, idle_limit_bytes: int = IDLE_LIMIT_BYTES
    ) -> None:
        self._smallest_bytes = smallest_bytes
        self._idle: list[Tensor] = []  # (bytes,) each, in order of size
        self._idle_limit_bytes = idle_limit_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of the idle buffers."""
        return sum(buffer.numel() for buffer in self._idle)

    def lend(self, num_bytes: int) -> Tensor:
        """Return a buffer of at least `num_bytes` and at most four times as many; uint8, 1-D."""
        for index, buffer in enumerate(self._idle):
            if num_bytes <= buffer.numel() <= 4 * num_bytes:
                return self._idle.pop(index)
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def give_back(self, buffer: Tensor) -> None:
        """Keep `buffer` for later, or free it when it is small or the pool is full."""
        if not self._smallest_bytes < buffer.numel() <= self._idle_limit_bytes:
            return
        self._idle.append(buffer)
        self._idle.sort(key=Tensor.numel)
        while self.idle_bytes > self._idle_limit_bytes:
            self._idle.pop(0)


class ExchangeCollectives(Collectives):
    """Collectives over Gloo or MPI: exchange of slices in place of the backend's own algorithms.

    Each operation in flight has a tag of its own, above those of callers' messages.
    """

    _numbers_of_group: ClassVar[WeakKeyDictionary[dist.ProcessGroup, Iterator[int]]] = (
        WeakKeyDictionary()
    )

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._scratch = ScratchPool()
        self._numbers = self._numbers_of_group.setdefault(group, count())

    def _all_reduce_dtype(self, tensor: Tensor, op: ReduceOpName) -> torch.dtype:
        return tensor.dtype if self._is_direct(tensor, op) else _ring_dtype(tensor.dtype, op)

    def _reduce_scatter_dtype(
        self, output: Tensor, source: Tensor, op: ReduceOpName
    ) -> torch.dtype:
        return source.dtype

    def _all_reduce(self, output: Tensor, source: Tensor, op: ReduceOpName) -> StartedTransfer:
        if self._is_still(source):
            return copy_unless_same(output, source)
        if self._is_direct(source, op):
            return self._exchange_and_combine(output, [source] * self.size, op)
        if _ring_dtype(source.dtype, op) != source.dtype:
            return self._all_reduce_in_float32(output, source, op)
        return super()._all_reduce(output, source, op)

    def _reduce_scatter(self, output: Tensor, source: Tensor, op: ReduceOpName) -> StartedTransfer:
        if self._is_still(output):
            return copy_unless_same(output, source)
        return self._exchange_and_combine(output, source.view(self.size, -1).unbind(), op)

    def _all_gather(self, output: Tensor, source: Tensor) -> StartedTransfer:
        if self._is_still(output):
            return copy_unless_same(output, source)
        return self._gather_slices(output, source, [source.numel()] * self.size)

    def _reduce_slices(
        self, output: Tensor, source: Tensor, sizes: list[int], op: ReduceOpName
    ) -> StartedTransfer:
        slices = torch.split(source, sizes)
        if output.numel():
            return self._exchange_and_combine(output, slices, op)
        return StartedTransfer(works=self._exchange(slices, [output] * self.size))

    def _gather_slices(self, output: Tensor, source: Tensor, sizes: list[int]) -> StartedTransfer:
        slices = torch.split(output, sizes)
        works = self._exchange([source] * self.size, slices)
        copy_unless_same(slices[self.rank], source)  # while the messages move
        return StartedTransfer(works=works)

    def _all_to_all(
        self, output: Tensor, source: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> StartedTransfer:
        incoming = torch.split(output, output_splits)
        outgoing = torch.split(source, input_splits)
        works = self._exchange(outgoing, incoming)
        incoming[self.rank].copy_(outgoing[self.rank])  # while the messages move
        return StartedTransfer(works=works)

    def _all_reduce_in_float32(
        self, output: Tensor, source: Tensor, op: ReduceOpName
    ) -> StartedTransfer:
        num_bytes = 4 * source.numel()
        buffer = self._lend(num_bytes, source)
        wire = buffer[:num_bytes].view(torch.float32).copy_(source)
        work = dist.all_reduce(wire, group=self.group, async_op=True)

        def finish() -> None:
            self._settle(output, wire, op)
            self._give_back(buffer)

        return StartedTransfer(works=[cast("dist.Work", work)], finish=finish)

    def _exchange_and_combine(
        self, output: Tensor, outgoing: Sequence[Tensor], op: ReduceOpName
    ) -> StartedTransfer:
        """Send outgoing[i] to rank i and reduce what comes with outgoing[rank] into `output`."""
        own = outgoing[self.rank]
        # What is read first may land where the result goes, unless this rank's own slice lies
        # there.
        lands = output.dtype == own.dtype and output.data_ptr() != own.data_ptr()
        addends = [output] if lands else []
        num_bytes = (self.size - 1 - len(addends)) * own.numel() * own.itemsize
        buffer = self._lend(num_bytes, own) if num_bytes else None
        if buffer is not None:
            addends += buffer[:num_bytes].view(own.dtype).view(-1, own.numel()).unbind()
        addends.insert(self.rank, own)

        def finish() -> None:
            combine_in_rank_order(addends, self.rank, op, output)
            if buffer is not None:
                self._give_back(buffer)

        return StartedTransfer(works=self._exchange(outgoing, addends), finish=finish)

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[dist.Work]:
        tag = FIRST_RESERVED_TAG + next(self._numbers) % FIRST_RESERVED_TAG
        return start_exchange(self.group, outgoing, incoming, tag)

    def _send(self, tensor: Tensor, peer: int, tag: int) -> StartedTransfer:
        # `dist.isend` checks once more.
        return StartedTransfer(works=[self.group.send([tensor], peer, tag)])

    def _recv(self, tensor: Tensor, peer: int, tag: int) -> StartedTransfer:
        return StartedTransfer(works=[self.group.recv([tensor], peer, tag)])

    def _lend(self, num_bytes: int, like: Tensor) -> Tensor:
        """Return a uint8 buffer on the device of `like`; on CUDA torch's allocator keeps them."""
        if like.device.type == "cpu":
            return self._scratch.lend(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=like.device)

    def _give_back(self, buffer: Tensor) -> None:
        if buffer.device.type == "cpu":
            self._scratch.give_back(buffer)

    def _is_direct(self, tensor: Tensor, op: ReduceOpName) -> bool:
        num_bytes = tensor.nbytes
        if not _DIRECT_BYTES < num_bytes <= _DIRECT_BYTES_OF_FEW:
            return num_bytes <= _DIRECT_BYTES
        # Direct sends W - 1 tensors, the ring 2 (W - 1) / W of the type in which it sums: direct
        # sends the same on two ranks, and with halves less on three.
        more = self.size * tensor.itemsize - 2 * _ring_dtype(tensor.dtype, op).itemsize
        return more < 0 or (more == 0 and num_bytes >= _DIRECT_BYTES_OF_AS_MUCH)


def start_exchange(
    group: Any, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int
) -> list[dist.Work]:
    """Start to send outgoing[i] to each other rank i and to receive incoming[i].

    A tensor without elements is not sent.
    """
    rank, size = group.rank(), group.size()
    # Each rank starts with another peer, so that no rank is everyone's first.
    peers = [(rank + step) % size for step in range(1, size)]
    receives = [
        group.recv([incoming[peer]], peer, tag)  # `dist.irecv` checks once more
        for peer in reversed(peers)
        if incoming[peer].numel()
    ]
    sends = [group.send([outgoing[peer]], peer, tag) for peer in peers if outgoing[peer].numel()]
    return receives + sends


def _ring_dtype(dtype: torch.dtype, op: ReduceOpName) -> torch.dtype:
    """Return the type that Gloo's ring sends: it sums in that type, so halves travel widened."""
    return torch.float32 if op in ("sum", "avg") and is_narrow(dtype) else dtype
