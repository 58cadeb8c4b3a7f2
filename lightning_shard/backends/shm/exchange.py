"""Ranks that reach each other over Gloo, and every collective by messages between them.

An exchange gives each rank what another has for it, and everything else is made of exchanges:

    all-reduce    each rank reduces one slice of all tensors, and gives it to the others
    all-gather    each rank gives its tensor to the others
    broadcast     the root gives, the others receive

What moves is bytes, so that every dtype does; tensors are reduced in rank order, halves in float32.
Operations wait for their messages: they run on a group's thread, one after the other.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.backends._c10d import Store
from lightning_shard.backends.c10d_reduce_ops import reduce_tensors
from lightning_shard.backends.calls import Call, describe_tensor
from lightning_shard.backends.packing import pack, raw, room_for, unaliased, unpack, write
from lightning_shard.backends.shapes import FIRST_RESERVED_TAG
from lightning_shard.errors import CollectiveMismatchError


class GlooRanks:
    """Some ranks of a group, which send each other messages over Gloo.

    Args:
        store: A store of these ranks alone.
        rank: This rank's number among them.
        size: Number of ranks.
        timeout: Time after which a peer that has not come is an error.

    Attributes:
        rank: This rank's number among them.
        size: Number of ranks.
        group: Torch's own process group.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self.group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._numbers = count()

    def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Give outgoing[r] to rank r, and receive what it has for this rank in incoming[r].

        Args:
            outgoing: Contiguous tensors; one without elements is not sent.
            incoming: Contiguous tensors of as many elements as are sent to this rank.
        """
        tag = FIRST_RESERVED_TAG + next(self._numbers) % FIRST_RESERVED_TAG
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        works = [
            self.group.recv([bytes_of(incoming[peer])], peer, tag)
            for peer in reversed(peers)
            if incoming[peer].numel()
        ]
        works += [
            self.group.send([bytes_of(outgoing[peer])], peer, tag)
            for peer in peers
            if outgoing[peer].numel()
        ]
        own, kept = outgoing[self.rank], incoming[self.rank]
        if kept.numel() and own.data_ptr() != kept.data_ptr():
            kept.view(-1).copy_(own.view(-1))
        for work in works:
            work.wait()

    def reduce(self, flat: Tensor, op: Any, *, to: Iterable[int]) -> None:
        """Reduce a flat tensor of each rank in place on some ranks; each reduces one slice."""
        slices, wanted = flat.tensor_split(self.size), set(to)
        own = slices[self.rank]
        received = [own if rank == self.rank else torch.empty_like(own) for rank in self._ranks]
        self.exchange(slices, received)
        if own.numel():
            own.copy_(reduce_tensors(received, op))
        nothing = flat.new_empty(0)
        self.exchange(
            [own if rank in wanted else nothing for rank in self._ranks],
            [one if self.rank in wanted else own[:0] for one in slices]
            if self.rank in wanted
            else [nothing] * self.size,
        )

    @property
    def _ranks(self) -> range:
        return range(self.size)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory, uint8, 1-D."""
    return tensor.view(-1).view(torch.uint8)


def _all_reduce(ranks: GlooRanks, call: Call) -> None:
    flat = pack(call.inputs)
    ranks.reduce(flat, call.reduce_op, to=range(ranks.size))
    unpack(flat, call.inputs)


def _reduce(ranks: GlooRanks, call: Call) -> None:
    flat = pack(call.inputs).clone()  # what the other ranks gave stays as it is
    ranks.reduce(flat, call.reduce_op, to=[call.root])
    if call.rank == call.root:
        unpack(flat, call.inputs)


def _reduce_scatter(ranks: GlooRanks, call: Call) -> None:
    reduce_scatter(ranks, call, [pack([one]) for one in call.inputs], call.outputs[0])


def _reduce_scatter_single(ranks: GlooRanks, call: Call) -> None:
    for output, full in zip(call.outputs, call.inputs, strict=True):
        reduce_scatter(ranks, call, even_slices(pack([full]), ranks.size), output)


def reduce_scatter(ranks: GlooRanks, call: Call, given: Sequence[Tensor], output: Tensor) -> None:
    """Reduce what the ranks give to this one into `output`."""
    own = given[ranks.rank]
    check_room(call, output, own)
    received = [own if rank == ranks.rank else torch.empty_like(own) for rank in range(ranks.size)]
    ranks.exchange(given, received)
    if output.numel():
        write(output, reduce_tensors(received, call.reduce_op).to(output.dtype))


def _broadcast(ranks: GlooRanks, call: Call) -> None:
    flat = pack(call.inputs)
    is_root = call.rank == call.root
    nothing = [flat[:0]] * ranks.size
    received = [flat if rank == call.root else flat[:0] for rank in range(ranks.size)]
    ranks.exchange([flat] * ranks.size if is_root else nothing, nothing if is_root else received)
    unpack(flat, call.inputs)


def _all_gather(ranks: GlooRanks, call: Call) -> None:
    check_room(call, call.outputs[ranks.rank], call.inputs[0])
    own = pack(unaliased(call.inputs, call.outputs))
    _receive(ranks, [own] * ranks.size, call.outputs)


def _all_gather_single(ranks: GlooRanks, call: Call) -> None:
    for source, output in zip(call.inputs, call.outputs, strict=True):
        flat = room_for([output])
        slots = even_slices(flat, ranks.size)
        own = raw(source)
        if not own.is_contiguous() or own.data_ptr() != slots[ranks.rank].data_ptr():
            own = pack(unaliased([source], [output]))
        ranks.exchange([own] * ranks.size, slots)
        unpack(flat, [output])


def _gather(ranks: GlooRanks, call: Call) -> None:
    own = pack(unaliased(call.inputs, call.outputs))
    given = [own if rank == call.root else own[:0] for rank in range(ranks.size)]
    if call.rank == call.root:
        check_room(call, call.outputs[call.rank], call.inputs[0])
        _receive(ranks, given, call.outputs)
    else:
        ranks.exchange(given, [own[:0]] * ranks.size)


def _scatter(ranks: GlooRanks, call: Call) -> None:
    flat = room_for(call.outputs)
    received = [flat if rank == call.root else flat[:0] for rank in range(ranks.size)]
    given = [flat[:0]] * ranks.size
    if call.rank == call.root:
        check_room(call, call.outputs[0], call.inputs[call.rank])
        given = [pack([one]) for one in unaliased(call.inputs, call.outputs)]
    ranks.exchange(given, received)
    unpack(flat, call.outputs)


def _all_to_all(ranks: GlooRanks, call: Call) -> None:
    check_room(call, call.outputs[call.rank], call.inputs[call.rank])
    _receive(ranks, [pack([one]) for one in unaliased(call.inputs, call.outputs)], call.outputs)


def _receive(ranks: GlooRanks, given: Sequence[Tensor], slots: Sequence[Tensor]) -> None:
    rooms = [room_for([slot]) for slot in slots]
    ranks.exchange(given, rooms)
    for room, slot in zip(rooms, slots, strict=True):
        unpack(room, [slot])


def _barrier(ranks: GlooRanks, call: Call) -> None:
    del call
    ranks.exchange([torch.zeros(1)] * ranks.size, [torch.empty(1) for _ in range(ranks.size)])


def even_slices(flat: Tensor, size: int) -> list[Tensor]:
    """Return a flat tensor's slices for so many ranks, which divide it."""
    return list(flat.view(size, flat.numel() // size).unbind())


def check_room(call: Call, slot: Tensor, own: Tensor) -> None:
    """Raise CollectiveMismatchError unless what this rank gives to itself fits."""
    if slot.numel() != own.numel():
        raise CollectiveMismatchError(
            f"Rank {call.rank} of the group, {call} at {call.site}: got {describe_tensor(own)}, "
            f"expected {describe_tensor(slot)}, for which there is room here. Make outputs of the "
            f"sizes that the ranks give."
        )


OPERATIONS: dict[str, Callable[[GlooRanks, Call], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all,
    "barrier": _barrier,
    "monitored_barrier": _barrier,
}
