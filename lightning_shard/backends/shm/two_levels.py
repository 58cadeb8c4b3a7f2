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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_shard.backends import liveness
from lightning_shard.backends._c10d import PrefixStore, Store
from lightning_shard.backends.calls import Call, op_name
from lightning_shard.backends.exchange import start_exchange
from lightning_shard.backends.group_handle import CallWork, FlightWork, InFlight, ranks_of
from lightning_shard.backends.liveness.interruption import end_at_exit
from lightning_shard.backends.packing import bits_of, pack, raw, room_for, unaliased, unpack, write
from lightning_shard.backends.python_group import ANY_SOURCE, PythonGroup
from lightning_shard.backends.rank_order import reduce_tensors
from lightning_shard.backends.shapes import FIRST_RESERVED_TAG
from lightning_shard.backends.shm.heap import own_heap
from lightning_shard.backends.shm.process_group import BACKEND_NAME, ShmGroup

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
        given, room = ([bits_of(one) for one in tensors] for tensors in (outgoing, incoming))
        works = start_exchange(self.group, given, room, tag)
        own, kept = outgoing[self.rank], incoming[self.rank]
        if kept.numel() and own.data_ptr() != kept.data_ptr():
            kept.view(-1).copy_(own.view(-1))
        for work in works:
            work.wait()

    def reduce_flat(self, flat: Tensor, op: Any, *, to: Iterable[int]) -> None:
        """Reduce a flat tensor of each rank in place on some ranks; each reduces one slice."""
        slices, wanted = flat.tensor_split(self.size), set(to)
        own = slices[self.rank]
        received = self._room_like(own)
        self.exchange(slices, received)
        if own.numel():
            own.copy_(reduce_tensors(received, op))
        nothing = flat.new_empty(0)
        self.exchange(
            [own if rank in wanted else nothing for rank in range(self.size)],
            slices if self.rank in wanted else [nothing] * self.size,
        )

    def reduce_given(self, call: Call, given: Sequence[Tensor], output: Tensor) -> None:
        """Reduce what the ranks give to this one into `output`."""
        own = given[self.rank]
        call.check_own(output, own)
        received = self._room_like(own)
        self.exchange(given, received)
        if output.numel():
            write(output, reduce_tensors(received, call.reduce_op).to(output.dtype))

    def _room_like(self, own: Tensor) -> list[Tensor]:
        """Return room for such a tensor of each rank; this rank's is there."""
        return [own if rank == self.rank else torch.empty_like(own) for rank in range(self.size)]


class _Operations(GlooRanks):
    """All ranks of a group: the method of an operation's name carries it out."""

    def all_reduce(self, call: Call) -> None:
        flat = pack(call.inputs)
        self.reduce_flat(flat, call.reduce_op, to=range(self.size))
        unpack(flat, call.inputs)

    def reduce(self, call: Call) -> None:
        flat = pack(call.inputs).clone()  # what the other ranks gave stays as it is
        self.reduce_flat(flat, call.reduce_op, to=[call.root])
        if call.rank == call.root:
            unpack(flat, call.inputs)

    def reduce_scatter(self, call: Call) -> None:
        self.reduce_given(call, [pack([one]) for one in call.inputs], call.outputs[0])

    def reduce_scatter_single(self, call: Call) -> None:
        for output, full in zip(call.outputs, call.inputs, strict=True):
            self.reduce_given(call, even_slices(pack([full]), self.size), output)

    def broadcast(self, call: Call) -> None:
        flat = pack(call.inputs)
        nothing = [flat[:0]] * self.size
        if call.rank == call.root:
            self.exchange([flat] * self.size, nothing)
        else:
            self.exchange(nothing, [*nothing[: call.root], flat, *nothing[call.root + 1 :]])
        unpack(flat, call.inputs)

    def all_gather(self, call: Call) -> None:
        gives, takes = call.gives(self.size), call.takes()
        call.check_own(takes.get(self.rank), gives.get(self.rank))
        packed = (pack([one]) for one in unaliased(call.inputs, call.outputs))
        given = dict(zip(map(id, call.inputs), packed, strict=True))
        rooms = {rank: room_for([slot]) for rank, slot in takes.items()}
        nothing, ranks = raw((*call.inputs, *call.outputs)[0]).new_empty(0), range(self.size)
        self.exchange(
            [given[id(gives[rank])] if rank in gives else nothing for rank in ranks],
            [rooms.get(rank, nothing) for rank in ranks],
        )
        for rank, room in rooms.items():
            unpack(room, [takes[rank]])

    gather = scatter = all_to_all = all_to_all_single = all_gather

    def all_gather_single(self, call: Call) -> None:
        for source, output in zip(call.inputs, call.outputs, strict=True):
            flat = room_for([output])
            slots = even_slices(flat, self.size)
            own = raw(source)
            if not own.is_contiguous() or own.data_ptr() != slots[self.rank].data_ptr():
                own = pack(unaliased([source], [output]))
            self.exchange([own] * self.size, slots)
            unpack(flat, [output])

    def barrier(self, call: Call) -> None:
        del call
        self.exchange([torch.zeros(1)] * self.size, [torch.empty(1) for _ in range(self.size)])

    monitored_barrier = barrier


def even_slices(flat: Tensor, size: int) -> list[Tensor]:
    """Return a flat tensor's slices for so many ranks, which divide it."""
    return list(flat.view(size, flat.numel() // size).unbind())


class LineFlight(InFlight):
    """An operation in a line, which keeps the order in which a group calls."""

    source = -1

    def __init__(self, description: str) -> None:
        super().__init__(threading.Lock())
        self.description = description
        self.has_ended = threading.Event()

    def end(self, error: Exception | None) -> None:
        """Note that the operation has ended; called by the line."""
        self.error, self.done = error, True
        self.has_ended.set()
        self.call_back()


class LineWork(FlightWork):
    """The handle of one operation in a line."""

    _flight: LineFlight

    @override
    def _wait_until(self, end: float | None) -> bool:
        while not self._flight.has_ended.wait(_CHECK_SECONDS):
            liveness.check(self._flight.description)
            if end is not None and time.monotonic() > end:
                return False
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended, with its results or an error."""
        return self._flight.done


class Line:
    """Runs operations in the order in which they come."""

    def __init__(self, name: str) -> None:
        self._waiting: SimpleQueue[tuple[LineFlight, Callable[[], None]] | None] = SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        end_at_exit(self._thread, partial(self._waiting.put, None))

    def put(self, flight: LineFlight, operation: Callable[[], None]) -> None:
        """Run an operation once those before it have ended; after an error none is run any more."""
        self._waiting.put((flight, operation))

    def end(self) -> None:
        """End the thread once it has nothing left to run; one that waits for a peer is left."""
        self._waiting.put(None)
        self._thread.join(_LONGEST_END_SECONDS)

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            flight, operation = entry
            if self._failure is None:
                try:
                    with torch.inference_mode():
                        operation()
                except Exception as error:
                    self._failure = error
            flight.end(self._failure)


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
    works = [ranks.group.send([bits_of(one)], call.root, call.tag or 0) for one in kept]
    return GlooMessageWork(call, works, kept, lambda: None)


def receive(ranks: GlooRanks, call: Call) -> GlooMessageWork:
    """Start to receive a call's tensors from its root, or from whichever rank sends first."""
    rooms, tag = [room_for([tensor]) for tensor in call.outputs], call.tag or 0
    works = [
        ranks.group.recv_anysource([bits_of(one)], tag)
        if call.root == ANY_SOURCE
        else ranks.group.recv([bits_of(one)], call.root, tag)
        for one in rooms
    ]

    def finish() -> None:
        for room, tensor in zip(rooms, call.outputs, strict=True):
            unpack(room, [tensor])

    return GlooMessageWork(call, works, rooms, finish)


class Levels:
    """The two groups that a rank sums and gathers in."""

    def __init__(
        self, members: Sequence[Sequence[int]], inner: ShmGroup, across: GlooRanks
    ) -> None:
        self.members, self.inner, self.across = members, inner, across
        self.place = inner.rank()

    def all_reduce(self, call: Call) -> None:
        """Sum tensors in place."""
        flat = pack(call.inputs)
        wide = _widened(flat)
        slices = list(wide.tensor_split(self.inner.size()))
        own = own_heap().empty(slices[self.place].numel(), wide.dtype)
        self.inner.reduce_scatter([own], [slices]).wait()
        self.across.reduce_flat(own, dist.ReduceOp.SUM, to=range(self.across.size))
        self._average(own, call)
        self.inner.allgather([slices], [own]).wait()
        if wide is not flat:
            flat.copy_(wide)
        unpack(flat, call.inputs)

    def reduce_scatter(self, call: Call, given: Sequence[Tensor], output: Tensor) -> None:
        """Sum what the ranks give to this one into `output`; `given` has a tensor for each rank."""
        call.check_own(output, given[call.rank])
        places = range(self.inner.size())
        inputs = [_column(self._of_place(given, place)) for place in places]
        own = own_heap().empty(inputs[self.place].numel(), inputs[0].dtype)
        self.inner.reduce_scatter([own], [inputs]).wait()
        sizes = [one.numel() for one in self._of_place(given, self.place)]
        total = own.new_empty(output.numel())
        as_sum = replace(call, reduce_op=dist.ReduceOp.SUM)
        self.across.reduce_given(as_sum, torch.split(own, sizes), total)
        self._average(total, call)
        write(output, total.to(output.dtype))

    def all_gather(self, call: Call, own: Tensor, slots: Sequence[Tensor]) -> None:
        """Bring the ranks' tensors together in `slots`, one for each rank."""
        call.check_own(slots[call.rank], own)
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

    backend_name = BACKEND_NAME

    def __init__(self, options: Any, store: Store, hosts: Sequence[str]) -> None:
        rank, timeout = options.group_rank, options.timeout
        super().__init__(options.group_id, ranks_of(options), rank)
        self._all = _Operations(PrefixStore("all", store), rank, len(hosts), timeout)
        self._levels = self._make_levels(timeout, store, hosts)
        self._line = Line(f"shm-line-{options.group_id}")

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
        return Levels(members, inner, across)

    @override
    def _start(self, call: Call) -> LineWork | GlooMessageWork:
        description = f"{call} of {self.group_desc} at {call.site}"
        liveness.check(description)
        if call.tag is not None:
            return (send if call.op == "send" else receive)(self._all, call)
        flight = LineFlight(description)
        self._line.put(flight, partial(self._run, call))
        return LineWork(flight, call)

    def _run(self, call: Call) -> None:
        levels = self._levels if _is_worth_two(call) else None
        if levels is None:
            getattr(self._all, call.op)(call)
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
