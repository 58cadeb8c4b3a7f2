"""Each operation as a generator: it yields what it waits for on the boards, and then goes on.

An all-reduce of a large tensor, in two rounds, in each of which a rank reads what it needs:

    rank 0  [a0|a1] <──b0── rank 1         rank 0  [s0|..] <──s1── rank 1
    rank 1  [b0|b1] <──a1── rank 0         rank 1  [..|s1] <──s0── rank 0
    then  s0 = a0 + b0,  s1 = a1 + b1      each slice lands where it belongs

A rank writes the slice of its own offer that no peer reads in that round. Sums go in rank order, by
blocks that stay in the cache; halves are summed in float32.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_shard.backends.calls import Call, describe_tensor, op_name
from lightning_shard.backends.packing import pack, raw, room_for, unpack, write
from lightning_shard.backends.rank_order import reduce_tensors
from lightning_shard.backends.shm.board import HeapPlace
from lightning_shard.backends.shm.mail import Mail
from lightning_shard.backends.shm.room import Offered, Room
from lightning_shard.errors import CollectiveMismatchError


@dataclass(frozen=True)
class BoardWait:
    """What an operation waits for.

    Attributes:
        is_over: Whether it can go on.
        absent: Returns the group ranks that it waits for.
    """

    is_over: Callable[[], bool]
    absent: Callable[[], list[int]]


Round = Generator[BoardWait, Any, None]
Steps = Generator[BoardWait, Any, int | None]
"""What a receive returns is the group rank of its source."""

# Up to here every rank reads every rank's tensor: one round, where two would take longer.
_AT_ONCE_BYTES = 64 << 10
_BLOCK_NUMEL = 1 << 17
_SUMMED_AS_THEY_ARE = (torch.float32, torch.float64)
_PLAIN_SUMS = ("SUM", "AVG")


def _posting(room: Room, number: int, call: Call, make: Callable[[], Offered], size: int) -> Any:
    """Post an offer once there is room for it, and wait for the turn to read the round."""
    if not room.may_post(number, size):
        yield BoardWait(lambda: room.may_post(number, size), lambda: room.undrained(number))
    offered = make()
    room.post(number, call, offered)
    yield _turn(room, number)
    room.check(number, call)
    return offered


def _turn(room: Room, number: int) -> BoardWait:
    return BoardWait(lambda: room.is_turn(number), lambda: room.missing(number))


def _ending(room: Room, number: int, offered: Offered) -> Round:
    """End a round that this rank has read; wait for its peers where they read in place."""
    room.has_read(number)
    if offered.in_place and room.undrained(number):
        yield BoardWait(lambda: not room.undrained(number), lambda: room.undrained(number))


def _round(
    room: Room, call: Call, tensors: Sequence[Tensor], written: Sequence[Tensor] = ()
) -> Any:
    number = room.reserve()
    size = sum(tensor.nbytes for tensor in tensors)
    offered = yield from _posting(room, number, call, lambda: room.offer(tensors, written), size)
    return number, offered


def _all_reduce(room: Room, mail: Mail, call: Call) -> Round:
    flat = pack(call.inputs)
    if flat.nbytes <= _AT_ONCE_BYTES:
        number, offered = yield from _round(room, call, [flat], [flat])
        parts = [_only(room, number, rank, flat) for rank in range(room.size)]
        unpack(reduce_tensors(parts, call.reduce_op).to(flat.dtype), call.inputs)
        yield from _ending(room, number, offered)
        return
    first = room.reserve(2)
    offered = yield from _posting(room, first, call, lambda: room.offer([flat]), flat.nbytes)
    ours = _only(room, first, room.rank, flat)
    of_each_rank = [_only(room, first, rank, flat) for rank in range(room.size)]
    _reduce_into(_slice(ours, room.rank, room.size), _slices(of_each_rank, room.rank), call)
    room.has_read(first)
    room.post(first + 1, call, offered)
    yield _turn(room, first + 1)
    _copy_slices(of_each_rank, flat)
    unpack(flat, call.inputs)
    yield from _ending(room, first + 1, offered)


def _copy_slices(of_each_rank: Sequence[Tensor], flat: Tensor) -> None:
    """Write each rank's slice of its own tensor into `flat`."""
    for rank, whole in enumerate(of_each_rank):
        target, source = (_slice(one, rank, len(of_each_rank)) for one in (flat, whole))
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)


def _reduce(room: Room, mail: Mail, call: Call) -> Round:
    flat = pack(call.inputs)
    number, offered = yield from _round(room, call, [flat], [flat])
    if room.rank == call.root:
        of_each_rank = [_only(room, number, rank, flat) for rank in range(room.size)]
        _reduce_into(flat, of_each_rank, call)
        unpack(flat, call.inputs)
    yield from _ending(room, number, offered)


def _reduce_scatter(room: Room, mail: Mail, call: Call) -> Round:
    output = raw(call.outputs[0])
    others = [one for rank, one in enumerate(call.inputs) if rank != room.rank]
    written = [output] if any(_touch(output, one) for one in others) else []
    number, offered = yield from _round(room, call, call.inputs, written)
    parts = [_part(room, number, rank, room.rank, output, call) for rank in range(room.size)]
    _reduce_to(output, parts, call)
    yield from _ending(room, number, offered)


def _reduce_scatter_single(room: Room, mail: Mail, call: Call) -> Round:
    flats = [pack([full]) for full in call.inputs]
    outputs = [raw(output) for output in call.outputs]
    safe = all(
        not _touch(output, flat) or output.data_ptr() == _slice_address(flat, room)
        for output in outputs
        for flat in flats
    )
    number, offered = yield from _round(room, call, flats, [] if safe else outputs)
    for index, (output, flat) in enumerate(zip(outputs, flats, strict=True)):
        of_each_rank = [_whole(room, number, rank, index, flat) for rank in range(room.size)]
        _reduce_to(output, _slices(of_each_rank, room.rank), call)
    yield from _ending(room, number, offered)


def _slice_address(flat: Tensor, room: Room) -> int:
    return flat.data_ptr() + room.rank * (flat.numel() // room.size) * flat.itemsize


def _broadcast(room: Room, mail: Mail, call: Call) -> Round:
    given = call.inputs if room.rank == call.root else []
    number, offered = yield from _round(room, call, given)
    if room.rank != call.root:
        for index, target in enumerate(call.inputs):
            _copy(target, _part(room, number, call.root, index, target, call))
    yield from _ending(room, number, offered)


def _all_gather(room: Room, mail: Mail, call: Call) -> Round:
    number, offered = yield from _round(room, call, call.inputs, _written(room, call.outputs, call))
    for rank, slot in enumerate(call.outputs):
        _copy(slot, _part(room, number, rank, 0, slot, call))
    yield from _ending(room, number, offered)


def _all_gather_single(room: Room, mail: Mail, call: Call) -> Round:
    flats = [room_for([output]) for output in call.outputs]
    slots = [_slice(flat, rank, room.size) for flat in flats for rank in range(room.size)]
    number, offered = yield from _round(room, call, call.inputs, _written(room, slots, call))
    for index, flat in enumerate(flats):
        for rank in range(room.size):
            slot = _slice(flat, rank, room.size)
            _copy(slot, _part(room, number, rank, index, slot, call))
    for flat, output in zip(flats, call.outputs, strict=True):
        unpack(flat, [output])
    yield from _ending(room, number, offered)


def _written(room: Room, slots: Sequence[Tensor], call: Call) -> list[Tensor]:
    """Return the slots that are written, all but the one that is the input itself."""
    return [
        slot
        for index, slot in enumerate(slots)
        if index % room.size != room.rank
        or slot.data_ptr() != call.inputs[index // room.size].data_ptr()
    ]


def _gather(room: Room, mail: Mail, call: Call) -> Round:
    number, offered = yield from _round(room, call, call.inputs, call.outputs)
    if room.rank == call.root:
        for rank, slot in enumerate(call.outputs):
            _copy(slot, _part(room, number, rank, 0, slot, call))
    yield from _ending(room, number, offered)


def _scatter(room: Room, mail: Mail, call: Call) -> Round:
    given = call.inputs if room.rank == call.root else []
    number, offered = yield from _round(room, call, given, call.outputs)
    target = call.outputs[0]
    _copy(target, _part(room, number, call.root, room.rank, target, call))
    yield from _ending(room, number, offered)


def _all_to_all(room: Room, mail: Mail, call: Call) -> Round:
    number, offered = yield from _round(room, call, call.inputs, call.outputs)
    for rank, slot in enumerate(call.outputs):
        _copy(slot, _part(room, number, rank, room.rank, slot, call))
    yield from _ending(room, number, offered)


def _gather_common(room: Room, mail: Mail, call: Call) -> Round:
    """Bring a common buffer up to date; a second round where some rank has edits to give."""
    buffer, flag = call.results[0], call.inputs[0]
    first = room.reserve(2)
    flag.fill_(int(buffer.look()))
    offer = partial(room.offer, [flag], [flag])
    offered = yield from _posting(room, first, call, offer, flag.nbytes)
    if any(bool(_only(room, first, rank, flag)) for rank in range(room.size)):
        if flag:
            buffer.write_part()
        room.has_read(first)
        room.post(first + 1, call, offered)
        yield _turn(room, first + 1)
    buffer.see()
    room.has_read(first + 1)


def _barrier(room: Room, mail: Mail, call: Call) -> Round:
    number, offered = yield from _round(room, call, [])
    yield from _ending(room, number, offered)


def _send(room: Room, mail: Mail, call: Call) -> Round:
    for tensor in call.inputs:
        peer, number, size = call.root, mail.number(call.root), tensor.nbytes

        def may_send(number: int = number, size: int = size) -> bool:
            return mail.may_send(call.root, number, size)

        if not may_send():
            yield BoardWait(may_send, lambda: [call.root])
        mail.send(peer, number, tensor, call.tag or 0)


def _recv(room: Room, mail: Mail, call: Call) -> Steps:
    source: int | None = None

    def has_come() -> bool:
        nonlocal source
        if source is None:
            source = mail.receive(call)
        return source is not None

    mail.ask(call)
    if not has_come():
        yield BoardWait(has_come, lambda: [call.root] if call.root >= 0 else [])
    return source


# --- reading ------------------------------------------------------------------------------------


def _only(room: Room, number: int, rank: int, like: Tensor) -> Tensor:
    return _whole(room, number, rank, 0, like)


def _whole(room: Room, number: int, rank: int, index: int, like: Tensor) -> Tensor:
    return room.view(rank, room.places(number, rank)[index], like.dtype)


def _part(room: Room, number: int, rank: int, index: int, slot: Tensor, call: Call) -> Tensor:
    """Return the tensor that a rank gives at an index, for a slot of this rank.

    Raises:
        CollectiveMismatchError: It has another number of elements than the slot.
    """
    places = room.places(number, rank)
    place = places[index] if index < len(places) else HeapPlace(0, -1)
    if place.numel != slot.numel():
        raise CollectiveMismatchError(
            f"Rank {room.rank} of the group, {call} at {call.site}: rank {rank} gives "
            f"{max(place.numel, 0)} elements, expected {describe_tensor(slot)}, for which there is "
            f"room here. Make outputs of the sizes that the ranks give."
        )
    return room.view(rank, place, slot.dtype)


def _slice(whole: Tensor, rank: int, size: int) -> Tensor:
    """Return a rank's part of a tensor that is cut as evenly as can be."""
    numel = whole.numel()
    return whole[numel * rank // size : numel * (rank + 1) // size]


def _slices(of_each_rank: Sequence[Tensor], rank: int) -> list[Tensor]:
    return [_slice(whole, rank, len(of_each_rank)) for whole in of_each_rank]


def _touch(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _copy(slot: Tensor, source: Tensor) -> None:
    """Write a slot, unless it is the source itself."""
    if slot.numel() and not (slot.is_contiguous() and slot.data_ptr() == source.data_ptr()):
        write(slot, source)


def _reduce_to(output: Tensor, parts: Sequence[Tensor], call: Call) -> None:
    if output.is_contiguous():
        _reduce_into(output.view(-1), parts, call)
    elif output.numel():
        write(output, reduce_tensors(parts, call.reduce_op).to(output.dtype))


def _reduce_into(target: Tensor, parts: Sequence[Tensor], call: Call) -> None:
    """Reduce the ranks' parts into `target`, which may be one of them, by blocks."""
    op = op_name(call.reduce_op)
    is_plain = len(parts) == 2 and target.dtype in _SUMMED_AS_THEY_ARE
    for start in range(0, target.numel(), _BLOCK_NUMEL):
        block = slice(start, start + _BLOCK_NUMEL)
        if is_plain and op in _PLAIN_SUMS:
            torch.add(parts[0][block], parts[1][block], out=target[block])
            if op == "AVG":
                target[block].div_(2)
        else:
            target[block].copy_(reduce_tensors([part[block] for part in parts], call.reduce_op))


OPERATIONS: dict[str, Callable[[Room, Mail, Call], Steps]] = {
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
    "gather_common": _gather_common,
    "send": _send,
    "recv": _recv,
}
