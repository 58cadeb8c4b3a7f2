"""Each collective as a generator: it yields the MPI requests that must be complete to go on.

An all-reduce of a large tensor, in two steps, neither of which sends more than a ring would:

    rank 0  [a0|a1] ──a1──> rank 1         rank 0  [s0|..] ──s0──> rank 1
    rank 1  [b0|b1] ──b0──> rank 0         rank 1  [..|s1] ──s1──> rank 0
    then  s0 = a0 + b0,  s1 = a1 + b1      each slice lands where it belongs

Collectives of a communicator must start in the same order on every rank, so the first step starts
all that an operation needs, and second steps are messages, told apart by the operation's number.
What MPI moves stays in the generator's variables until then: MPI knows addresses only.
"""

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from torch import Tensor

from lightning_shard.backends.calls import Call, describe_tensor
from lightning_shard.backends.mpi.runtime import mpi
from lightning_shard.backends.packing import pack, raw, room_for, unaliased, unpack
from lightning_shard.backends.python_group import ANY_SOURCE
from lightning_shard.backends.rank_order import reduce_tensors
from lightning_shard.backends.streams import drain_streams
from lightning_shard.errors import CollectiveMismatchError, ConfigError, LayoutError

Requests = list[Any]
Steps = Generator[Requests, Any, None]
_MOST_ELEMENTS = 2**31 - 1


def full(tensor: Tensor) -> list[Any]:
    """Describe a contiguous tensor to MPI, in elements, since its counts end at 2**31 - 1."""
    return [_memory(tensor), _checked(tensor.numel()), _type_of_size(tensor.itemsize)]


def parts(tensor: Tensor, counts: Sequence[int]) -> list[Any]:
    """Describe a contiguous tensor whose parts, one for each rank, lie one after the other."""
    _checked(tensor.numel())
    return [_memory(tensor), (list(counts), None), _type_of_size(tensor.itemsize)]


def _memory(tensor: Tensor) -> Any:
    drain_streams([tensor])  # MPI knows no streams
    return mpi().buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.itemsize)


def _type_of_size(itemsize: int) -> Any:
    module = mpi()
    types = {
        1: module.BYTE,
        2: module.INT16_T,
        4: module.INT32_T,
        8: module.INT64_T,
        16: module.C_DOUBLE_COMPLEX,
    }
    return types[itemsize]


def _checked(numel: int) -> int:
    if numel > _MOST_ELEMENTS:
        raise LayoutError(
            f"mpi: got a tensor of {numel} elements, expected at most {_MOST_ELEMENTS} in one "
            "operation. Communicate it in parts, or use smaller units."
        )
    return numel


class GroupOfRanks(Protocol):
    """The part of an `MPIGroup` that an operation needs."""

    comm: Any
    inner: Any

    def size(self) -> int:
        """Return the number of ranks."""

    def next_number(self) -> int:
        """Return a tag for the inner messages of one more collective, the same on every rank."""

    def lane(self, tag: int) -> tuple[Any, int]:
        """Return the communicator and MPI's tag for messages under c10d's tag."""


# Up to here every rank gets every rank's tensor at once: one step, where two would take longer.
_GATHERED_BYTES = 256 << 10


def _all_reduce(group: GroupOfRanks, call: Call) -> Steps:
    flat = pack(call.inputs)
    if flat.numel() * flat.itemsize * group.size() <= _GATHERED_BYTES:
        everyones = flat.new_empty(group.size(), flat.numel())
        yield [group.comm.Iallgather(full(flat), _evenly(everyones))]
        flat = reduce_tensors(everyones.unbind(), call.reduce_op).to(flat.dtype)
    else:
        yield from _reduce_in_slices(group, call, flat, to=range(group.size()))
    unpack(flat, call.inputs)


def _reduce(group: GroupOfRanks, call: Call) -> Steps:
    flat = pack(call.inputs).clone()  # what the other ranks gave stays as it is
    yield from _reduce_in_slices(group, call, flat, to=[call.root])
    if call.rank == call.root:
        unpack(flat, call.inputs)


def _reduce_in_slices(group: GroupOfRanks, call: Call, flat: Tensor, *, to: Sequence[int]) -> Steps:
    """Reduce `flat` in place on the ranks `to`; each rank reduces one slice of it."""
    slices = flat.tensor_split(group.size())
    number = group.next_number()
    own = slices[call.rank]
    request, received = _give_slices(group, call, slices, flat)
    yield [request]
    _reduce_into(own, received, call)
    receives = [s for s in range(group.size()) if call.rank in to and s != call.rank]
    sends = [target for target in to if target != call.rank]
    yield [
        *(group.inner.Irecv(full(slices[source]), source, number) for source in receives),
        *(group.inner.Isend(full(own), target, number) for target in sends),
    ]


def _give_slices(
    group: GroupOfRanks, call: Call, slices: Sequence[Tensor], flat: Tensor
) -> tuple[Any, Tensor]:
    """Start to give each rank its slice; `flat` holds them one after the other."""
    received = flat.new_empty(group.size(), slices[call.rank].numel())
    even = [slices[call.rank].numel()] * group.size()
    sent = parts(flat, _numels(slices))
    return group.comm.Ialltoallv(sent, parts(received, even)), received


def _reduce_into(output: Tensor, received: Tensor, call: Call) -> None:
    if output.numel():
        output.copy_(reduce_tensors(received.unbind(), call.reduce_op).view(output.shape))


def _reduce_scatter(group: GroupOfRanks, call: Call) -> Steps:
    _check_room(call, call.outputs[0], call.inputs[call.rank])
    flat = pack(call.inputs)
    request, received = _give_slices(group, call, call.inputs, flat)
    yield [request]
    _reduce_into(raw(call.outputs[0]), received, call)


def _reduce_scatter_single(group: GroupOfRanks, call: Call) -> Steps:
    flats = [pack([full]) for full in call.inputs]
    begun = [_give_slices(group, call, flat.tensor_split(group.size()), flat) for flat in flats]
    yield [request for request, _ in begun]
    for output, (_, received) in zip(call.outputs, begun, strict=True):
        _reduce_into(raw(output), received, call)


def _broadcast(group: GroupOfRanks, call: Call) -> Steps:
    flat = pack(call.inputs)
    yield [group.comm.Ibcast(full(flat), call.root)]
    if call.rank != call.root:
        unpack(flat, call.inputs)


def _all_gather(group: GroupOfRanks, call: Call) -> Steps:
    _check_room(call, call.outputs[call.rank], call.inputs[0])
    flat = room_for(call.outputs)
    source = pack(unaliased(call.inputs, call.outputs))
    yield [group.comm.Iallgatherv(full(source), parts(flat, _numels(call.outputs)))]
    unpack(flat, call.outputs)


def _all_gather_single(group: GroupOfRanks, call: Call) -> Steps:
    flats = [room_for([output]) for output in call.outputs]
    given = [_to_give(group, call, *pair) for pair in zip(call.inputs, flats, strict=True)]
    yield [
        group.comm.Iallgather(
            mpi().IN_PLACE if own is None else full(own), _evenly(flat, group.size())
        )
        for own, flat in zip(given, flats, strict=True)
    ]
    for flat, output in zip(flats, call.outputs, strict=True):
        unpack(flat, [output])


def _to_give(group: GroupOfRanks, call: Call, own: Tensor, flat: Tensor) -> Tensor | None:
    """Return this rank's input of an all-gather into `flat`; None where it lies there already."""
    here = flat.view(group.size(), -1)[call.rank] if flat.numel() else flat
    if own.is_contiguous() and own.data_ptr() == here.data_ptr():
        return None
    return pack(unaliased([own], call.outputs))


def _gather(group: GroupOfRanks, call: Call) -> Steps:
    own = pack(unaliased(call.inputs, call.outputs))
    if call.rank != call.root:
        yield [group.comm.Igatherv(full(own), None, call.root)]
        return
    _check_room(call, call.outputs[call.rank], call.inputs[0])
    flat = room_for(call.outputs)
    yield [group.comm.Igatherv(full(own), parts(flat, _numels(call.outputs)), call.root)]
    unpack(flat, call.outputs)


def _scatter(group: GroupOfRanks, call: Call) -> Steps:
    flat = room_for(call.outputs)
    if call.rank == call.root:
        _check_room(call, call.outputs[0], call.inputs[call.rank])
        given = pack(unaliased(call.inputs, call.outputs))
        sent = parts(given, _numels(call.inputs))
        yield [group.comm.Iscatterv(sent, full(flat), call.root)]
    else:
        yield [group.comm.Iscatterv(None, full(flat), call.root)]
    unpack(flat, call.outputs)


def _all_to_all(group: GroupOfRanks, call: Call) -> Steps:
    _check_room(call, call.outputs[call.rank], call.inputs[call.rank])
    flat = room_for(call.outputs)
    given = pack(unaliased(call.inputs, call.outputs))
    sent, received = parts(given, _numels(call.inputs)), parts(flat, _numels(call.outputs))
    yield [group.comm.Ialltoallv(sent, received)]
    unpack(flat, call.outputs)


def _barrier(group: GroupOfRanks, call: Call) -> Steps:
    del call
    yield [group.comm.Ibarrier()]


def _send(group: GroupOfRanks, call: Call) -> Steps:
    comm, tag = group.lane(call.tag or 0)
    flats = [pack([tensor]) for tensor in call.inputs]
    yield [comm.Isend(full(flat), call.root, tag) for flat in flats]


def _recv(group: GroupOfRanks, call: Call) -> Steps:
    comm, tag = group.lane(call.tag or 0)
    source = mpi().ANY_SOURCE if call.root == ANY_SOURCE else call.root
    flats = [room_for([tensor]) for tensor in call.outputs]
    status = yield [comm.Irecv(full(flat), source, tag) for flat in flats]
    _check_full(call, status)
    for flat, tensor in zip(flats, call.outputs, strict=True):
        unpack(flat, [tensor])


def _numels(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def _evenly(flat: Tensor, size: int | None = None) -> list[Any]:
    """Describe a tensor of equal parts, one for each rank, as `Iallgather` and such want it."""
    size = len(flat) if size is None else size
    memory, numel, datatype = full(flat)
    return [memory, numel // size, datatype]


def _check_room(call: Call, slot: Tensor, own: Tensor) -> None:
    if slot.numel() != own.numel() or slot.dtype != own.dtype:
        raise ConfigError(
            f"Rank {call.rank} of the group, {call} at {call.site}: gives itself "
            f"{describe_tensor(own)}, but has room for {describe_tensor(slot)} there; expected "
            "the same number of elements of the same dtype."
        )


def _check_full(call: Call, status: Any) -> None:
    """Raise when less has come than there is room for; MPI itself refuses more."""
    expected = sum(tensor.numel() * tensor.itemsize for tensor in call.outputs)
    if len(call.outputs) == 1 and (got := status.Get_elements(mpi().BYTE)) != expected:
        raise CollectiveMismatchError(
            f"Rank {call.rank} of the group, {call} at {call.site}: got {got} bytes, expected "
            f"{expected}. Send and receive tensors of the same shape and dtype."
        )


OPERATIONS: dict[str, Callable[[GroupOfRanks, Call], Steps]] = {
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
    "send": _send,
    "recv": _recv,
}
