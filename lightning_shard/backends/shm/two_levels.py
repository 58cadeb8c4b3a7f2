"""The process group of one rank over several hosts: shared memory inside each, Gloo between them.

    host A   rank 0 ─┐ reduce-scatter   slice 0  ◄── Gloo ──►  slice 0   ┌─ rank 2   host B
             rank 1 ─┘ in shared memory slice 1  ◄── Gloo ──►  slice 1   └─ rank 3
                          and an all-gather in shared memory after it

So a host sends each element of a sum to another host once. It needs as many ranks of the group on
every host; other groups and operations go over Gloo from rank to rank, all of them made of
exchanges, in which each rank is given what another has for it. Operations wait for their messages:
they run on a group's thread, one after the other.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from lightning_shard.backends import liveness
from lightning_shard.backends._c10d import PrefixStore, Store
from lightning_shard.backends.calls import Call, describe_tensor, op_name
from lightning_shard.backends.group_handle import CallWork
from lightning_shard.backends.liveness.interruption import end_at_exit
from lightning_shard.backends.packing import pack, raw, room_for, unaliased, unpack, write
from lightning_shard.backends.python_group import ANY_SOURCE, PythonGroup
from lightning_shard.backends.rank_order import reduce_tensors
from lightning_shard.backends.shapes import FIRST_RESERVED_TAG
from lightning_shard.backends.shm.heap import own_heap
from lightning_shard.backends.shm.process_group import BACKEND_NAME, ShmGroup
from lightning_shard.errors import CollectiveMismatchError

_AT_ONCE_BYTES = 64 << 10  # up to here three steps take longer than one over Gloo
_SUMS = ("SUM", "AVG")
_CHECK_SECONDS = 0.05
_LONGEST_END_SECONDS = 5.0
_GATHERS = ("all_gather", "all_gather_single")


class GlooRanks:
    """Some ranks of a group, which send each other messages over Gloo."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self.group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._numbers = count()

    def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Give outgoing[r] to rank r, and receive what it gives in incoming[r]; all contiguous."""
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
            slices if self.rank in wanted else [nothing] * self.size,
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


class LineWork(CallWork):
    """The handle of one operation in a line, which keeps the order in which a group calls."""

    def __init__(self, call: Call, description: str) -> None:
        super().__init__(call)
        self._description = description
        self._has_ended = threading.Event()
        self._error: Exception | None = None
        self._future: Future[Any] = Future()

    def end(self, error: Exception | None) -> None:
        """Note that the operation has ended; called by the line."""
        self._error = error
        self._has_ended.set()
        if error is None:
            self._future.set_result(list(self._call.results))
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the results are there; after a `timeout` of its own the operation goes on."""
        until = time.monotonic() + timeout.total_seconds() if timeout else None
        while not self._has_ended.wait(_CHECK_SECONDS):
            lifeline = liveness.current()
            if lifeline is not None and lifeline.has_verdict:
                lifeline.check(self._description)
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"{self._description} took longer than {timeout}.")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended, with its results or an error."""
        return self._has_ended.is_set()

    def is_success(self) -> bool:
        """Whether the results are there."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return the error of an operation that has failed, else None."""
        return self._error

    def _source(self) -> int:
        return -1

    def get_future(self) -> Future[Any]:
        """Return a future that ends with the operation, on the line's thread."""
        return self._future


class Line:
    """Runs operations in the order in which they come."""

    def __init__(self, name: str) -> None:
        self._waiting: SimpleQueue[tuple[LineWork, Callable[[], None]] | None] = SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        end_at_exit(self._thread, partial(self._waiting.put, None))

    def put(self, work: LineWork, operation: Callable[[], None]) -> LineWork:
        """Run an operation once those before it have ended; after an error none is run any more."""
        self._waiting.put((work, operation))
        return work

    def end(self) -> None:
        """End the thread once it has nothing left to run; one that waits for a peer is left."""
        self._waiting.put(None)
        self._thread.join(_LONGEST_END_SECONDS)

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            work, operation = entry
            if self._failure is None:
                try:
                    with torch.inference_mode():
                        operation()
                except Exception as error:
                    self._failure = error
            work.end(self._failure)


class GlooMessageWork(CallWork):
    """The handle of one message."""

    def __init__(
        self,
        call: Call,
        works: Sequence[dist.Work],
        kept: Sequence[object],
        finish: Callable[[], None],
    ) -> None:
        super().__init__(call)
        self._works, self._kept, self._finish = works, kept, finish
        self._has_ended = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message has left, or has come."""
        if self._has_ended:
            return True
        for work in self._works:
            work.wait(*((timeout,) if timeout else ()))
        self._has_ended = True
        self._finish()
        return True

    def is_completed(self) -> bool:
        """Whether the message has left, or is known to have come; a wait knows it."""
        return self._has_ended or all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether the message has left, or has come."""
        return self.is_completed()

    def _source(self) -> int:
        return int(self._works[-1]._source_rank()) if self._call.root < 0 else self._call.root


def send(ranks: GlooRanks, call: Call) -> GlooMessageWork:
    """Start to send a call's tensors to its root."""
    kept = [pack([tensor]) for tensor in call.inputs]
    works = [ranks.group.send([bytes_of(one)], call.root, call.tag or 0) for one in kept]
    return GlooMessageWork(call, works, kept, lambda: None)


def receive(ranks: GlooRanks, call: Call) -> GlooMessageWork:
    """Start to receive a call's tensors from its root, or from whichever rank sends first."""
    rooms, tag = [room_for([tensor]) for tensor in call.outputs], call.tag or 0
    works = [
        ranks.group.recv_anysource([bytes_of(one)], tag)
        if call.root == ANY_SOURCE
        else ranks.group.recv([bytes_of(one)], call.root, tag)
        for one in rooms
    ]

    def finish() -> None:
        for room, tensor in zip(rooms, call.outputs, strict=True):
            unpack(room, [tensor])

    return GlooMessageWork(call, works, rooms, finish)


class Levels:
    """The two groups that a rank sums and gathers in."""

    def __init__(
        self, members: Sequence[Sequence[int]], host: int, inner: ShmGroup, across: GlooRanks
    ) -> None:
        self.members, self.host = members, host
        self.inner, self.across = inner, across
        self.place = inner.rank()

    def all_reduce(self, call: Call) -> None:
        """Sum tensors in place."""
        flat = pack(call.inputs)
        wide = _widened(flat)
        slices = list(wide.tensor_split(self.inner.size()))
        own = own_heap().empty(slices[self.place].numel(), wide.dtype)
        self.inner.reduce_scatter([own], [slices]).wait()
        self.across.reduce(own, dist.ReduceOp.SUM, to=range(self.across.size))
        self._average(own, call)
        self.inner.allgather([slices], [own]).wait()
        if wide is not flat:
            flat.copy_(wide)
        unpack(flat, call.inputs)

    def reduce_scatter(self, call: Call, given: Sequence[Tensor], output: Tensor) -> None:
        """Sum what the ranks give to this one into `output`; `given` has a tensor for each rank."""
        check_room(call, output, given[call.rank])
        places = range(self.inner.size())
        inputs = [_column(self._of_place(given, place)) for place in places]
        own = own_heap().empty(inputs[self.place].numel(), inputs[0].dtype)
        self.inner.reduce_scatter([own], [inputs]).wait()
        sizes = [one.numel() for one in self._of_place(given, self.place)]
        total = own.new_empty(output.numel())
        as_sum = replace(call, reduce_op=dist.ReduceOp.SUM)
        reduce_scatter(self.across, as_sum, torch.split(own, sizes), total)
        self._average(total, call)
        write(output, total.to(output.dtype))

    def all_gather(self, call: Call, own: Tensor, slots: Sequence[Tensor]) -> None:
        """Bring the ranks' tensors together in `slots`, one for each rank."""
        check_room(call, slots[call.rank], own)
        places = range(self.inner.size())
        sizes = [[one.numel() for one in self._of_place(slots, place)] for place in places]
        brought = own_heap().empty(sum(sizes[self.place]), own.dtype)
        self.across.exchange([own] * self.across.size, torch.split(brought, sizes[self.place]))
        columns = [brought.new_empty(sum(of_place)) for of_place in sizes]
        self.inner.allgather([columns], [brought]).wait()
        for place, column in enumerate(columns):
            parts = torch.split(column, sizes[place])
            for slot, part in zip(self._of_place(slots, place), parts, strict=True):
                write(slot, part)

    def _of_place(self, tensors: Sequence[Tensor], place: int) -> list[Tensor]:
        """Return the tensors of the ranks that have a place on their hosts, host by host."""
        return [tensors[ranks[place]] for ranks in self.members]

    def _average(self, total: Tensor, call: Call) -> None:
        if op_name(call.reduce_op) == "AVG":
            total.div_(self.inner.size() * self.across.size)


def _widened(flat: Tensor) -> Tensor:
    """Return the tensor in the format in which it is summed: halves are rounded once."""
    return flat.float() if flat.itemsize < torch.float32.itemsize else flat


def _column(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors one after the other, where peers read them in place, and widened."""
    sizes = [part.numel() for part in parts]
    column = own_heap().empty(sum(sizes), _widened(parts[0][:0]).dtype)
    for slot, part in zip(torch.split(column, sizes), parts, strict=True):
        slot.copy_(part)
    return column


class TwoLevelGroup(PythonGroup):
    """One rank's handle of a group whose ranks are on several hosts."""

    backend_name: ClassVar[str] = BACKEND_NAME

    def __init__(
        self,
        name: str,
        global_ranks: tuple[int, ...],
        rank: int,
        timeout: timedelta,
        store: Store,
        hosts: Sequence[str],
    ) -> None:
        super().__init__(name, global_ranks, rank)
        self._all = GlooRanks(PrefixStore("all", store), rank, len(hosts), timeout)
        self._levels = self._make_levels(timeout, store, hosts)
        self._line = Line(f"shm-line-{name}")

    def _make_levels(self, timeout: timedelta, store: Store, hosts: Sequence[str]) -> Levels | None:
        rank, names = self.rank(), list(dict.fromkeys(hosts))
        members = [[one for one, host in enumerate(hosts) if host == name] for name in names]
        if len({*map(len, members)}) > 1 or len(members[0]) == 1:
            return None
        host = names.index(hosts[rank])
        neighbours = members[host]
        place = neighbours.index(rank)
        inner = ShmGroup(
            f"{self._name}/host {host}",
            tuple(self.global_ranks[one] for one in neighbours),
            place,
            timeout,
            PrefixStore(f"host/{host}", store),
        )
        across = GlooRanks(PrefixStore(f"across/{place}", store), host, len(names), timeout)
        return Levels(members, host, inner, across)

    @override
    def _start(self, call: Call) -> LineWork | GlooMessageWork:
        description = f"{call} of {self.group_desc} at {call.site}"
        lifeline = liveness.current()
        if lifeline is not None and lifeline.has_verdict:
            lifeline.check(description)
        if call.tag is not None:
            return (send if call.op == "send" else receive)(self._all, call)
        return self._line.put(LineWork(call, description), partial(self._run, call))

    def _run(self, call: Call) -> None:
        levels = self._levels if _is_worth_two(call) else None
        if levels is None:
            OPERATIONS[call.op](self._all, call)
        elif call.op == "all_reduce":
            levels.all_reduce(call)
        elif call.op == "reduce_scatter":
            levels.reduce_scatter(
                call, [raw(one).reshape(-1) for one in call.inputs], call.outputs[0]
            )
        elif call.op == "reduce_scatter_single":
            for full, output in zip(call.inputs, call.outputs, strict=True):
                levels.reduce_scatter(call, even_slices(pack([full]), self.size()), output)
        elif call.op == "all_gather":
            own = pack(unaliased(call.inputs, call.outputs))
            levels.all_gather(call, own, call.outputs)
        else:
            for source, output in zip(call.inputs, call.outputs, strict=True):
                self._gather_single(levels, call, source, output)

    def _gather_single(self, levels: Levels, call: Call, source: Tensor, output: Tensor) -> None:
        flat = raw(output) if output.is_contiguous() else raw(output).contiguous()
        own = pack([source])  # read before anything is written
        levels.all_gather(call, own, even_slices(flat.view(-1), self.size()))
        unpack(flat.view(-1), [output])

    @override
    def set_timeout(self, timeout: timedelta) -> None:
        if self._levels is not None:
            self._levels.inner.set_timeout(timeout)

    @override
    def shutdown(self) -> None:
        self._line.end()
        if self._levels is not None:
            self._levels.inner.shutdown()


def _is_worth_two(call: Call) -> bool:
    """Whether an operation goes over two levels: large sums, and large tensors brought together."""
    if call.op not in ("all_reduce", "reduce_scatter", "reduce_scatter_single", *_GATHERS):
        return False
    tensors = call.outputs if call.op in _GATHERS else call.inputs
    if sum(tensor.nbytes for tensor in tensors) <= _AT_ONCE_BYTES:
        return False
    return call.op in _GATHERS or (
        tensors[0].is_floating_point() and op_name(call.reduce_op) in _SUMS
    )
