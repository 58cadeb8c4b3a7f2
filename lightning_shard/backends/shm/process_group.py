"""The process group of one rank over shared memory: its room, its mail, and when to give up.

All of a process's flights move together, in the order in which they began, so that two ranks may
wait for two operations in different order; a thread moves them while nobody waits. Each operation
is a generator, which yields what it waits for on the boards, here a large all-reduce:

    rank 0  [a0|a1] <──b0── rank 1         rank 0  [s0|..] <──s1── rank 1
    rank 1  [b0|b1] <──a1── rank 0         rank 1  [..|s1] <──s0── rank 0
    then  s0 = a0 + b0,  s1 = a1 + b1      each slice lands where it belongs

A rank writes the slice of its own offer that no peer reads in that round. Sums go in rank order, by
blocks that stay in the cache; halves are summed in float32.
"""

import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from lightning_shard.backends import liveness
from lightning_shard.backends._c10d import PrefixStore, Store
from lightning_shard.backends.calls import Call, describe_tensor, op_name
from lightning_shard.backends.group_handle import FlightWork, InFlight, OperationWatch
from lightning_shard.backends.packing import pack, raw, room_for, unpack, write
from lightning_shard.backends.python_group import PythonGroup
from lightning_shard.backends.rank_order import reduce_tensors
from lightning_shard.backends.shm.board import HeapPlace
from lightning_shard.backends.shm.heap import Doorbell, own_heap
from lightning_shard.backends.shm.room import Mail, Offered, Room
from lightning_shard.errors import CollectiveMismatchError, RankFailedError


@dataclass(frozen=True)
class BoardWait:
    """What an operation waits for."""

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


class _Operation:
    """One operation of this rank: the method of its name has the steps, for one call.

    Most of them read one round: `_begin` it, take what the ranks give, and `_end` it.
    """

    def __init__(self, room: Room, mail: Mail, call: Call) -> None:
        self._room, self._mail, self._call = room, mail, call
        self._number = 0  # of the round that is read
        self._offered: Offered

    def all_reduce(self) -> Round:
        room, call, flat = self._room, self._call, pack(self._call.inputs)
        if flat.nbytes <= _AT_ONCE_BYTES:
            yield from self._begin([flat], [flat])
            total = reduce_tensors(self._of_each_rank(flat), call.reduce_op)
            unpack(total.to(flat.dtype), call.inputs)
        else:
            yield from self._post(room.reserve(2), partial(room.offer, [flat]), flat.nbytes)
            parts = self._of_each_rank(flat)
            own = _slice(parts[room.rank], room.rank, room.size)
            _reduce_into(own, _slices(parts, room.rank), call)
            yield from self._begin_next()
            for rank, part in enumerate(parts):
                _copy(_slice(flat, rank, room.size), _slice(part, rank, room.size))
            unpack(flat, call.inputs)
        yield from self._end()

    def reduce(self) -> Round:
        flat = pack(self._call.inputs)
        yield from self._begin([flat], [flat])
        if self._is_root:
            _reduce_into(flat, self._of_each_rank(flat), self._call)
            unpack(flat, self._call.inputs)
        yield from self._end()

    def reduce_scatter(self) -> Round:
        room, call, output = self._room, self._call, raw(self._call.outputs[0])
        others = [one for rank, one in enumerate(call.inputs) if rank != room.rank]
        yield from self._begin(
            call.inputs, [output] if any(_touch(output, one) for one in others) else []
        )
        _reduce_to(output, [self._part(r, room.rank, output) for r in range(room.size)], call)
        yield from self._end()

    def reduce_scatter_single(self) -> Round:
        room, call = self._room, self._call
        flats = [pack([full]) for full in call.inputs]
        outputs = [raw(output) for output in call.outputs]
        own = [_slice(flat, room.rank, room.size).data_ptr() for flat in flats]
        safe = all(
            not _touch(output, flat) or output.data_ptr() == address
            for output in outputs
            for flat, address in zip(flats, own, strict=True)
        )
        yield from self._begin(flats, [] if safe else outputs)
        for index, (output, flat) in enumerate(zip(outputs, flats, strict=True)):
            _reduce_to(output, _slices(self._of_each_rank(flat, index), room.rank), call)
        yield from self._end()

    def broadcast(self) -> Round:
        call = self._call
        yield from self._begin(call.inputs if self._is_root else [])
        for index, target in enumerate([] if self._is_root else call.inputs):
            _copy(target, self._part(call.root, index, target))
        yield from self._end()

    def all_gather(self) -> Round:
        call, slots, gathers = self._call, self._call.outputs, "gather" in self._call.op
        yield from self._begin(call.inputs, self._written(slots) if gathers else slots)
        for rank, slot in call.takes().items():
            _copy(slot, self._part(rank, 0 if gathers else call.rank, slot))
        yield from self._end()

    gather = scatter = all_to_all = all_to_all_single = all_gather

    def all_gather_single(self) -> Round:
        size, call = self._room.size, self._call
        flats = [room_for([output]) for output in call.outputs]
        slots = [_slice(flat, rank, size) for flat in flats for rank in range(size)]
        yield from self._begin(call.inputs, self._written(slots))
        for place, slot in enumerate(slots):
            _copy(slot, self._part(place % size, place // size, slot))
        for flat, output in zip(flats, call.outputs, strict=True):
            unpack(flat, [output])
        yield from self._end()

    def gather_common(self) -> Round:
        """Bring a common buffer up to date; a second round where some rank has edits to give."""
        room, buffer, flag = self._room, self._call.results[0], self._call.inputs[0]
        first = room.reserve(2)
        flag.fill_(int(buffer.look()))
        yield from self._post(first, partial(room.offer, [flag], [flag]), flag.nbytes)
        if any(self._of_each_rank(flag)):
            if flag:
                buffer.write_part()
            yield from self._begin_next()
        buffer.see()
        room.has_read(first + 1)

    def barrier(self) -> Round:
        yield from self._begin([])
        yield from self._end()

    monitored_barrier = barrier

    def send(self) -> Round:
        mail, call = self._mail, self._call
        for tensor in call.inputs:
            number = mail.number(call.root)
            may_send = partial(mail.may_send, call.root, number, tensor.nbytes)
            if not may_send():
                yield BoardWait(may_send, lambda: [call.root])
            mail.send(call.root, number, tensor, call.tag or 0)

    def recv(self) -> Steps:
        call = self._call
        source: int | None = None

        def has_come() -> bool:
            nonlocal source
            if source is None:
                source = self._mail.receive(call)
            return source is not None

        self._mail.ask(call)
        if not has_come():
            yield BoardWait(has_come, lambda: [call.root] if call.root >= 0 else [])
        return source

    # --- a round ------------------------------------------------------------------------------

    def _begin(self, tensors: Sequence[Tensor], written: Sequence[Tensor] = ()) -> Round:
        """Offer tensors in the next round, and wait for the turn to read it."""
        room, size = self._room, sum(tensor.nbytes for tensor in tensors)
        yield from self._post(room.reserve(), partial(room.offer, tensors, written), size)

    def _post(self, number: int, make: Callable[[], Offered], size: int) -> Round:
        """Post an offer once there is room for it, and wait for the turn to read the round."""
        room, self._number = self._room, number
        if not room.may_post(number, size):
            yield BoardWait(partial(room.may_post, number, size), partial(room.undrained, number))
        self._offered = make()
        room.post(number, self._call, self._offered)
        yield self._turn()
        room.check(number, self._call)

    def _begin_next(self) -> Round:
        """End a round in which peers still read in place, and begin one with the same offer."""
        self._room.has_read(self._number)
        self._number += 1
        self._room.post(self._number, self._call, self._offered)
        yield self._turn()

    def _turn(self) -> BoardWait:
        room, number = self._room, self._number
        return BoardWait(partial(room.is_turn, number), partial(room.missing, number))

    def _end(self) -> Round:
        """End a round that this rank has read; wait for its peers where they read in place."""
        room, number = self._room, self._number
        room.has_read(number)
        if self._offered.in_place and room.undrained(number):
            yield BoardWait(lambda: not room.undrained(number), partial(room.undrained, number))

    @property
    def _is_root(self) -> bool:
        return self._room.rank == self._call.root

    def _written(self, slots: Sequence[Tensor]) -> list[Tensor]:
        """Return the slots that are written, all but the one that is the input itself."""
        room, inputs = self._room, self._call.inputs
        return [
            slot
            for index, slot in enumerate(slots)
            if index % room.size != room.rank
            or slot.data_ptr() != inputs[index // room.size].data_ptr()
        ]

    def _of_each_rank(self, like: Tensor, index: int = 0) -> list[Tensor]:
        """Return the tensor that each rank gives at an index, 1-D, where it lies."""
        room = self._room
        places = (room.places(self._number, rank)[index] for rank in range(room.size))
        return [room.view(rank, place, like.dtype) for rank, place in enumerate(places)]

    def _part(self, rank: int, index: int, slot: Tensor) -> Tensor:
        """Return the tensor that a rank gives at an index, for a slot of this rank."""
        room, call = self._room, self._call
        places = room.places(self._number, rank)
        place = places[index] if index < len(places) else HeapPlace(0, -1)
        if place.numel != slot.numel():
            raise CollectiveMismatchError(
                f"Rank {room.rank} of the group, {call} at {call.site}: rank {rank} gives "
                f"{max(place.numel, 0)} elements, expected {describe_tensor(slot)}, for which "
                f"there is room here. Make outputs of the sizes that the ranks give."
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


_SPINS, _YIELDS = 20, 200
_SLEEP_SECONDS = 0.02
_UNWATCHED_SLEEP_SECONDS = 0.005
BACKEND_NAME = "shm"
_left_rooms: list[Room] = []  # at whose boards peers may still look


class ShmFlight(InFlight):
    """The steps of one operation."""

    def __init__(self, steps: Steps, watch: "_ShmOperationWatch") -> None:
        super().__init__(flights.lock)
        self._source = -1
        self._steps, self._watch = steps, watch
        self._wait: BoardWait | None = None

    @property
    @override
    def source(self) -> int:
        return self._source

    def poll(self) -> None:
        """Go on as far as possible without waiting; under the lock of `flights`."""
        try:
            while not self.done and (self._wait is None or self._wait.is_over()):
                with torch.inference_mode():
                    self._wait = next(self._steps)
        except StopIteration as end:
            self._source = -1 if end.value is None else end.value
            self.done = True
        except Exception as error:
            self.fail(error)

    def check(self) -> None:
        """End the flight if it can never end by itself."""
        if not self.done and self._wait is not None:
            error = self._watch.why_it_stops(self._wait)
            if error is not None:
                self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the flight with an error; its generator is kept, since peers may read its memory."""
        if not self.done:
            self.error, self.done = error, True
            self._watch.broke(error)


class Flights:
    """All flights of this process that have not ended."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._flights: list[ShmFlight] = []
        self._waiting = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, flight: ShmFlight) -> None:
        """Start a flight."""
        with self.lock:
            self._flights.append(flight)
            self._poll_locked()
        self._call_back(flight)
        if not flight.done and not self._waiting:
            self.follow()

    def poll(self) -> None:
        """Let every flight go on as far as it can."""
        with self.lock:
            ended = self._poll_locked()
        for flight in ended:
            self._call_back(flight)

    def wait(self, flight: ShmFlight, doorbell: Doorbell, until: float | None) -> bool:
        """Return once a flight has ended, or at a time of `time.monotonic`; whether it has."""
        polls = 0
        self._waiting += 1
        try:
            while not flight.done:
                self.poll()
                if flight.done:
                    break
                polls += 1
                if polls > _YIELDS:
                    self._sleep(flight, doorbell, _SLEEP_SECONDS)
                    flight.check()
                elif polls > _SPINS:
                    os.sched_yield()
                if until is not None and time.monotonic() > until:
                    return flight.done
        finally:
            self._waiting -= 1
            if self._flights and not self._waiting:
                self.follow()
        self._call_back(flight)
        return True

    def _sleep(self, flight: ShmFlight | None, doorbell: Doorbell, seconds: float) -> None:
        word = doorbell.listen()
        try:
            self.poll()
            if flight is None or not flight.done:
                doorbell.sleep(word, seconds)
        finally:
            doorbell.end_sleep()

    def _poll_locked(self) -> list[ShmFlight]:
        for flight in self._flights:
            flight.poll()
        ended = [flight for flight in self._flights if flight.done]
        if ended:
            self._flights = [flight for flight in self._flights if not flight.done]
        return ended

    def _call_back(self, flight: ShmFlight) -> None:
        if flight.done and flight.is_followed:
            flight.call_back()

    # --- while nobody waits -----------------------------------------------------------------------

    def follow(self) -> None:
        """Let the thread look after flights while nobody waits."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="shm-progress", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        doorbell = own_heap().doorbell
        while True:
            with self._changed:
                while self._waiting or not self._flights:
                    self._changed.wait()
            self._sleep(None, doorbell, _UNWATCHED_SLEEP_SECONDS)
            for flight in list(self._flights):
                if flight.is_followed:
                    flight.check()  # since nobody may be waiting who would
                    self._call_back(flight)

    def forget(self) -> None:
        """Drop everything in a forked child, which is no rank."""
        self.__init__()  # type: ignore[misc]


flights = Flights()

if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=flights.forget)


class ShmWork(FlightWork):
    """One rank's handle of one operation."""

    _flight: ShmFlight

    def __init__(self, flight: ShmFlight, call: Call, doorbell: Doorbell) -> None:
        super().__init__(flight, call)
        self._doorbell = doorbell

    @override
    def _wait_until(self, end: float | None) -> bool:
        return flights.wait(self._flight, self._doorbell, end)

    def is_completed(self) -> bool:
        """Whether the operation has ended, with its results or an error."""
        if not self._flight.done:
            flights.poll()
            self._flight.check()
        return self._flight.done

    @override
    def get_future(self) -> Future[Any]:
        future = super().get_future()
        if not self._flight.done:
            flights.follow()
        return future


class ShmGroup(PythonGroup):
    """One rank's handle of one group; after the first `failure` the ranks are out of step."""

    backend_name = BACKEND_NAME
    shares_host = True

    def __init__(
        self, name: str, global_ranks: tuple[int, ...], rank: int, timeout: timedelta, store: Store
    ) -> None:
        super().__init__(name, global_ranks, rank, timeout)
        self.failure: Exception | None = None
        self.is_interrupted = False
        corner = PrefixStore(f"shm/{store.add(f'shm/made/{rank}', 1)}", store)
        _left_rooms[:] = [room for room in _left_rooms if not room.all_have_left]
        self._room = Room(own_heap(), corner, rank, len(global_ranks))
        self._mail = Mail(self._room)

    @override
    def _start(self, call: Call) -> ShmWork:
        watch = _ShmOperationWatch(self, call)
        if (failure := self.failure or watch.peer_failure()) is not None:
            raise failure
        steps = getattr(_Operation(self._room, self._mail, call), call.op)()
        flight = ShmFlight(steps, watch)
        flights.begin(flight)
        return ShmWork(flight, call, self._room.heap.doorbell)

    def absent(self, ranks: list[int]) -> list[int]:
        """Return the global ranks among group ranks that have left, or whose processes ended."""
        boards = self._room.boards
        gone = [rank for rank in ranks if boards[rank].has_left or boards[rank].heap.has_ended]
        return [self.global_ranks[rank] for rank in gone]

    def interrupt(self) -> None:
        """Have every waiting operation raise; may be called from any thread."""
        self.is_interrupted = True
        self._room.heap.doorbell.ring()

    @override
    def shutdown(self) -> None:
        self._room.leave()
        if self._room not in _left_rooms:
            _left_rooms.append(self._room)


class _ShmOperationWatch(OperationWatch):
    """Watches one operation of this rank for the flight, and makes its errors."""

    _group: ShmGroup

    def __init__(self, group: ShmGroup, call: Call) -> None:
        super().__init__(group, call, call.site)
        self._begin = time.monotonic()

    def broke(self, error: Exception) -> None:
        """Have the group's later operations raise the same error."""
        self._group.failure = self._group.failure or error

    def why_it_stops(self, wait: BoardWait) -> Exception | None:
        """Return the error when a rank has failed or left, or the time-out is over; else None."""
        group, lifeline = self._group, liveness.current()
        failure = group.failure or self.peer_failure()
        if failure is not None:
            return failure
        gone = group.absent(wait.absent())
        if gone and not wait.is_over():
            if lifeline is not None:
                explained = lifeline.explain(str(self))
                if lifeline.has_verdict:
                    return explained
            return RankFailedError(
                f"{self.place} can never go on with {self}: rank {', '.join(map(str, gone))} has "
                "ended without it. Look for a rank that returned early, called sys.exit or was "
                "killed."
            )
        if group.is_interrupted and lifeline is not None:
            return lifeline.explain(str(self))
        if time.monotonic() < self._begin + group.timeout.total_seconds():
            return None
        if lifeline is not None:
            return lifeline.explain(str(self))
        late = ", ".join(str(group.global_ranks[rank]) for rank in wait.absent())
        return RankFailedError(
            f"{self.place} has waited for the group's time-out in {self}, and rank "
            f"{late or 'unknown'} has not come. Look for the first error among the other ranks' "
            "output."
        )
