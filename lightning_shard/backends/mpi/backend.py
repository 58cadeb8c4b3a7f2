"""MPI: ranks started by mpirun or a cluster's own launcher.

MPI makes progress when it is called. A waiting rank calls it all the time; otherwise a thread does
so every half a millisecond, so that no peer waits for a rank that is busy elsewhere.

An all-reduce of a large tensor, in two steps, neither of which sends more than a ring would:

    rank 0  [a0|a1] ──a1──> rank 1         rank 0  [s0|..] ──s0──> rank 1
    rank 1  [b0|b1] ──b0──> rank 0         rank 1  [..|s1] ──s1──> rank 0
    then  s0 = a0 + b0,  s1 = a1 + b1      each slice lands where it belongs

Collectives of a communicator must start in the same order on every rank, so the first step starts
all that an operation needs, and second steps are messages, told apart by the operation's number.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, cast
from urllib.parse import parse_qsl, urlparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import register_rendezvous_handler
from typing_extensions import override

from lightning_shard.backends import _c10d, liveness
from lightning_shard.backends._c10d import PrefixStore, Store, init_default_group
from lightning_shard.backends.authentication.store import JobStore, store_at
from lightning_shard.backends.authentication.token import JobAddress, remember
from lightning_shard.backends.base import DEFAULT_TIMEOUT, Backend
from lightning_shard.backends.calls import Call
from lightning_shard.backends.debug_wrapper import debug_name, exchange_collectives, register_debug
from lightning_shard.backends.exchange import ExchangeCollectives
from lightning_shard.backends.group_handle import FlightWork, InFlight, OperationWatch, ranks_of
from lightning_shard.backends.liveness.job_server import serve
from lightning_shard.backends.mpi import runtime
from lightning_shard.backends.mpi.runtime import COLLECTIVE, MADE, Need, given_up, lock, mpi
from lightning_shard.backends.objects import guard_torch
from lightning_shard.backends.packing import pack, raw, room_for, unaliased, unpack, write
from lightning_shard.backends.python_group import ANY_SOURCE, PythonGroup
from lightning_shard.backends.rank_order import reduce_tensors
from lightning_shard.backends.shapes import FIRST_RESERVED_TAG
from lightning_shard.backends.streams import drain_streams
from lightning_shard.core.call_site import CallSite, find_call_site
from lightning_shard.errors import (
    CollectiveMismatchError,
    ConfigError,
    LayoutError,
    RankFailedError,
)

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

Steps = Generator[list[Any], Any, None]
_MOST_ELEMENTS = 2**31 - 1
Describe = Callable[..., list[Any]]


def full(tensor: Tensor, _: object = None) -> list[Any]:
    """Describe a contiguous tensor to MPI, in elements, since its counts end at 2**31 - 1."""
    return [_memory(tensor), _checked(tensor.numel()), _type_of_size(tensor.itemsize)]


def parts(tensor: Tensor, of_ranks: Iterable[Tensor]) -> list[Any]:
    """Describe a contiguous tensor in which parts of these sizes lie one after the other."""
    _checked(tensor.numel())
    return [_memory(tensor), ([*map(Tensor.numel, of_ranks)], None), _type_of_size(tensor.itemsize)]


def _memory(tensor: Tensor) -> Any:
    drain_streams([tensor])  # MPI knows no streams
    return mpi().buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.itemsize)


def _type_of_size(itemsize: int) -> Any:
    names = {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}
    return getattr(mpi(), names[itemsize])


def _checked(numel: int) -> int:
    if numel > _MOST_ELEMENTS:
        raise LayoutError(
            f"mpi: got a tensor of {numel} elements, expected at most {_MOST_ELEMENTS} in one "
            "operation. Communicate it in parts, or use smaller units."
        )
    return numel


_COPIES: dict[str, tuple[str, Describe, Describe]] = {
    "all_gather": ("Iallgatherv", full, parts),
    "gather": ("Igatherv", full, parts),
    "scatter": ("Iscatterv", parts, full),
    "all_to_all": ("Ialltoallv", parts, parts),
    "all_to_all_single": ("Ialltoallv", parts, parts),
}
"""MPI's name of each, and how it is told what is given and what is taken."""

# Up to here every rank gets every rank's tensor at once: one step, where two would take longer.
_GATHERED_BYTES = 256 << 10


class _Operation:
    """One operation: the method of its name yields the requests that must be complete to go on.

    What MPI moves stays in the method's variables until then: MPI knows addresses only.
    """

    def __init__(self, group: "MPIGroup", call: Call) -> None:
        self._group, self._comm, self._call = group, group.comm, call
        self._size = group.size()

    def all_reduce(self) -> Steps:
        call, flat = self._call, pack(self._call.inputs)
        if flat.nbytes * self._size <= _GATHERED_BYTES:
            everyones = flat.new_empty(self._size, flat.numel())
            yield [self._comm.Iallgather(full(flat), _evenly(everyones, self._size))]
            flat = reduce_tensors(everyones.unbind(), call.reduce_op).to(flat.dtype)
        else:
            yield from self._reduce_in_slices(flat, to=range(self._size))
        unpack(flat, call.inputs)

    def reduce(self) -> Steps:
        call = self._call
        flat = pack(call.inputs).clone()  # what the other ranks gave stays as it is
        yield from self._reduce_in_slices(flat, to=[call.root])
        if call.rank == call.root:
            unpack(flat, call.inputs)

    def _reduce_in_slices(self, flat: Tensor, *, to: Sequence[int]) -> Steps:
        """Reduce `flat` in place on the ranks `to`; each rank reduces one slice of it."""
        rank, inner, number = self._call.rank, self._group.inner, self._group.next_number()
        slices = flat.tensor_split(self._size)
        own = slices[rank]
        request, received = self._give_slices(slices, flat)
        yield [request]
        self._reduce_into(own, received)
        receives = [source for source in range(self._size) if rank in to and source != rank]
        sends = [target for target in to if target != rank]
        yield [
            *(inner.Irecv(full(slices[source]), source, number) for source in receives),
            *(inner.Isend(full(own), target, number) for target in sends),
        ]

    def _give_slices(self, slices: Sequence[Tensor], flat: Tensor) -> tuple[Any, Tensor]:
        """Start to give each rank its slice; `flat` holds them one after the other."""
        received = flat.new_empty(self._size, slices[self._call.rank].numel())
        sent, got = parts(flat, slices), parts(received, received.unbind())
        return self._comm.Ialltoallv(sent, got), received

    def _reduce_into(self, output: Tensor, received: Tensor) -> None:
        if output.numel():
            total = reduce_tensors(received.unbind(), self._call.reduce_op)
            output.copy_(total.view(output.shape))

    def reduce_scatter(self) -> Steps:
        call = self._call
        call.check_own(call.outputs[0], call.inputs[call.rank])
        flat = pack(call.inputs)
        request, received = self._give_slices(call.inputs, flat)
        yield [request]
        self._reduce_into(raw(call.outputs[0]), received)

    def reduce_scatter_single(self) -> Steps:
        flats = [pack([full]) for full in self._call.inputs]
        begun = [self._give_slices(flat.tensor_split(self._size), flat) for flat in flats]
        yield [request for request, _ in begun]
        for output, (_, received) in zip(self._call.outputs, begun, strict=True):
            self._reduce_into(raw(output), received)

    def broadcast(self) -> Steps:
        call, flat = self._call, pack(self._call.inputs)
        yield [self._comm.Ibcast(full(flat), call.root)]
        if call.rank != call.root:
            unpack(flat, call.inputs)

    def all_gather(self) -> Steps:
        call = self._call
        name, give, take = _COPIES[call.op]
        call.check_own(call.takes().get(call.rank), call.gives(self._size).get(call.rank))
        given = pack(unaliased(call.inputs, call.outputs)) if call.inputs else None
        taken = room_for(call.outputs) if call.outputs else None
        sent = None if given is None else give(given, call.inputs)
        received = None if taken is None else take(taken, call.outputs)
        root = [call.root] if call.root >= 0 else []
        yield [getattr(self._comm, name)(sent, received, *root)]
        if taken is not None:
            unpack(taken, call.outputs)

    gather = scatter = all_to_all = all_to_all_single = all_gather

    def all_gather_single(self) -> Steps:
        call = self._call
        flats = [room_for([output]) for output in call.outputs]
        given = [self._to_give(*pair) for pair in zip(call.inputs, flats, strict=True)]
        yield [
            self._comm.Iallgather(
                mpi().IN_PLACE if own is None else full(own), _evenly(flat, self._size)
            )
            for own, flat in zip(given, flats, strict=True)
        ]
        for flat, output in zip(flats, call.outputs, strict=True):
            unpack(flat, [output])

    def _to_give(self, own: Tensor, flat: Tensor) -> Tensor | None:
        """Return this rank's input of an all-gather into `flat`; None if it lies there already."""
        here = flat.view(self._size, -1)[self._call.rank] if flat.numel() else flat
        if own.is_contiguous() and own.data_ptr() == here.data_ptr():
            return None
        return pack(unaliased([own], self._call.outputs))

    def barrier(self) -> Steps:
        yield [self._comm.Ibarrier()]

    monitored_barrier = barrier

    def send(self) -> Steps:
        call = self._call
        comm, tag = self._group.lane(call.tag or 0)
        flats = [pack([tensor]) for tensor in call.inputs]
        yield [comm.Isend(full(flat), call.root, tag) for flat in flats]

    def recv(self) -> Steps:
        call = self._call
        comm, tag = self._group.lane(call.tag or 0)
        source = mpi().ANY_SOURCE if call.root == ANY_SOURCE else call.root
        flats = [room_for([tensor]) for tensor in call.outputs]
        status = yield [comm.Irecv(full(flat), source, tag) for flat in flats]
        _check_full(call, status)
        for flat, tensor in zip(flats, call.outputs, strict=True):
            unpack(flat, [tensor])


def _evenly(flat: Tensor, size: int) -> list[Any]:
    """Describe a tensor of equal parts, one for each rank, as `Iallgather` and such want it."""
    memory, numel, datatype = full(flat)
    return [memory, numel // size, datatype]


def _check_full(call: Call, status: Any) -> None:
    """Raise when less has come than there is room for; MPI itself refuses more."""
    expected = sum(tensor.numel() * tensor.itemsize for tensor in call.outputs)
    if len(call.outputs) == 1 and (got := status.Get_elements(mpi().BYTE)) != expected:
        raise CollectiveMismatchError(
            f"Rank {call.rank} of the group, {call} at {call.site}: got {got} bytes, expected "
            f"{expected}. Send and receive tensors of the same shape and dtype."
        )


_PERIOD_SECONDS = 0.0005
BACKEND_NAME = "mpi4py"  # c10d keeps the name "mpi" for its own, even where torch lacks it
_POLL_SECONDS = 0.0005
_RECV_ANY = f"recv {ANY_SOURCE}"
# A wait spins, then yields the core, then sleeps: answers come in microseconds when the peers run
# on cores of their own, and leave the core to them when they do not.
_SPINS, _YIELDS = 50, 500
_SLEEP_SECONDS = 0.0001
INIT_METHOD = "mpi://"


class MPIFlight(InFlight):
    """The steps of one operation; each begins when the requests of the one before are complete."""

    def __init__(self, steps: Steps, watch: "_MPIOperationWatch") -> None:
        super().__init__(lock)
        self._status: Any = None
        self._steps, self._watch = steps, watch
        self._requests: list[Any] = []
        with lock:
            self._next_step()

    def poll(self) -> bool:
        """Move on as far as possible without waiting; return whether it has ended."""
        with lock:
            try:
                while not self.done and self._are_complete():
                    self._next_step()
            except Exception as error:
                self._fail(self._watch.explain(error))
        if self.done:
            self.call_back()
        return self.done

    def check(self) -> None:
        """End the flight if it can never end by itself."""
        if not self.done and (error := self._watch.why_it_stops()) is not None:
            self._fail(error)
            self.call_back()

    def _fail(self, error: Exception) -> None:
        """End the flight with an error; its memory is kept, since MPI may still write to it."""
        with lock:
            if not self.done:
                self.error = error
                given_up.append(self)
                self.done = True

    @property
    @override
    def source(self) -> int:
        return -1 if not self.done or self._status is None else int(self._status.Get_source())

    def _are_complete(self) -> bool:
        if len(self._requests) == 1:
            self._status = mpi().Status()
            complete: bool = self._requests[0].Test(self._status)
            return complete
        return bool(mpi().Request.Testall(self._requests))

    def _next_step(self) -> None:
        with torch.inference_mode():
            try:
                self._requests = self._steps.send(self._status)
            except StopIteration:
                self.done = True


class ProgressThread:
    """Moves the flights of this process on while nobody waits for them."""

    def __init__(self) -> None:
        self._flights: list[MPIFlight] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._waiting = 0
        self._ended = False

    def add(self, flight: MPIFlight) -> None:
        """Take over a flight that has not ended."""
        with self._changed:
            if self._ended:
                return
            self._flights.append(flight)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mpi-progress", daemon=True)
                self._thread.start()
            self._changed.notify()

    def end(self) -> None:
        """Stop the thread, before MPI ends."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._flights and not self._ended:
                    self._changed.wait()
                if self._ended:
                    return
                flights = list(self._flights)
            for flight in flights:
                if not flight.poll() and flight.is_followed:
                    flight.check()  # since nobody may be waiting who would
            ended = {id(flight) for flight in flights if flight.done}
            with self._changed:
                self._flights = [one for one in self._flights if id(one) not in ended]
            time.sleep(_PERIOD_SECONDS)


progress = ProgressThread()


def in_place(group: "MPIGroup", call: Call) -> Steps:
    """Carry `call` out where its tensors lie."""
    yield from getattr(_Operation(group, call), call.op)()


def must_stage(tensors: Sequence[Tensor]) -> bool:
    """Whether these tensors lie where MPI cannot reach; the first time, rank 0 warns."""
    if all(tensor.device.type == "cpu" for tensor in tensors) or runtime.is_cuda_aware():
        return False
    _warn_once()
    return True


def staged(group: "MPIGroup", call: Call) -> Steps:
    """Carry `call` out on copies in host memory, and copy the results back."""
    with torch.inference_mode():
        host = replace(
            call,
            inputs=[raw(tensor).cpu() for tensor in call.inputs],
            outputs=[raw(tensor).cpu() for tensor in call.outputs],
        )
    yield from in_place(group, host)
    written = call.outputs or call.inputs
    for target, source in zip(written, host.outputs or host.inputs, strict=True):
        write(target, source)


@cache
def _warn_once() -> None:
    if mpi().COMM_WORLD.rank == 0:
        warnings.warn(
            "This MPI library does not take GPU memory: tensors travel through copies on the host. "
            "Use an MPI built with CUDA, or backend='nccl'.",
            stacklevel=2,
        )


class MPIWork(FlightWork):
    """One rank's handle of one operation over MPI."""

    _flight: MPIFlight

    @override
    def _wait_until(self, end: float | None) -> bool:
        polls = 0
        while not self._flight.poll():
            _pause(polls)
            polls += 1
            if polls > _YIELDS or polls % 100 == 0:
                self._flight.check()
            if end is not None and time.monotonic() > end:
                return False
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended, with its results or an error."""
        if not self._flight.poll():
            self._flight.check()
        return self._flight.done


def _pause(polls: int) -> None:
    if polls > _YIELDS:
        time.sleep(_SLEEP_SECONDS)
    elif polls > _SPINS:
        os.sched_yield()


class MPIGroup(PythonGroup):
    """One rank's handle of one group."""

    backend_name = BACKEND_NAME

    def __init__(self, options: Any) -> None:
        name, ranks = options.group_id, ranks_of(options)
        super().__init__(name, ranks, options.group_rank, options.timeout)
        self._numbers = count()
        self._largest_tag = runtime.largest_tag()
        self._tally = runtime.departures.tally(name)
        self._await_members(options.store)
        tag = sum(name.encode()) % self._largest_tag  # tells groups apart that are made at once
        self.comm: Intracomm = runtime.communicator(ranks, tag)
        self.inner: Intracomm = runtime.communicator(ranks, tag)

    def _await_members(self, store: Store) -> None:
        """Wait until every rank of the group has come to make it."""
        # Making a communicator waits inside MPI, where this rank's operations in flight stand
        # still.
        self._tally[MADE] += 1
        need = Need(
            group=self._name, ranks=self.global_ranks, parts=[MADE], number=self._tally[MADE]
        )
        watch = _MPIOperationWatch(self, "new_group", find_call_site(), need)
        board = PrefixStore(f"made/{store.add(f'made/{self._group_rank}', 1)}", store)
        board.set(str(self._group_rank), "")
        keys = [str(rank) for rank in range(self.size())]
        while not board.check(keys):
            if (error := watch.why_it_stops()) is not None:
                raise error
            time.sleep(_POLL_SECONDS)

    def next_number(self) -> int:
        """Return a tag for the inner messages of one more collective, the same on every rank."""
        return (2 * next(self._numbers)) % (self._largest_tag - 1)

    def lane(self, tag: int) -> "tuple[Intracomm, int]":
        """Return the communicator and MPI's tag for messages under c10d's tag."""
        if tag >= FIRST_RESERVED_TAG:  # odd ones, beside the even ones of `next_number`
            return self.inner, (2 * tag + 1) % (self._largest_tag - 1)
        if tag > self._largest_tag:
            raise ConfigError(
                f"Rank {self.rank()} of {self.group_desc}: got the tag {tag}, expected one up to "
                f"{self._largest_tag}, the largest of this MPI library."
            )
        return self.comm, tag

    @override
    def _start(self, call: Call) -> MPIWork:
        with lock:  # operations are counted in the order in which they begin
            own, need = self._need(call)
            watch = _MPIOperationWatch(self, call, call.site, need)
            if (failure := watch.peer_failure()) is not None:
                raise failure
            try:
                flight = MPIFlight(self._steps(call), watch)
            except mpi().Exception as error:
                raise watch.explain(error) from error
            self._tally[own] += 1
        if not flight.poll():
            progress.add(flight)
        return MPIWork(flight, call)

    def _need(self, call: Call) -> tuple[str, Need]:
        """Return the tally's key that counts a call, and what the call needs of the other ranks."""
        here, own = self._group_rank, f"{call.op} {call.root}"
        ranks: tuple[int, ...] = ()  # who sends to a receive from any source, nobody knows
        if call.op == "send":
            parts, ranks = [f"recv {here}", _RECV_ANY], (self.global_ranks[call.root],)
        elif call.op == "recv":
            parts = [f"send {here}"]
            if call.root != ANY_SOURCE:
                ranks = (self.global_ranks[call.root],)
        else:
            own, parts, ranks = COLLECTIVE, [COLLECTIVE], self.global_ranks
        number = self._tally[own] + 1
        return own, Need(group=self._name, ranks=ranks, parts=parts, number=number)

    def _steps(self, call: Call) -> Steps:
        tensors = call.inputs or call.outputs
        yield from (staged if must_stage(tensors) else in_place)(self, call)
        drain_streams(tensors)  # who waits may read the results on any stream

    def shutdown(self) -> None:
        """Give the communicators back; the group is not used afterwards."""
        for comm in (self.comm, self.inner):
            runtime.free(comm)


class _MPIOperationWatch(OperationWatch):
    """Watches one operation of this rank for the flight, and makes its errors."""

    def __init__(self, group: MPIGroup, operation: Call | str, site: CallSite, need: Need) -> None:
        super().__init__(group, operation, site)
        self._need = need
        self._end = time.monotonic() + group.timeout.total_seconds()

    def why_it_stops(self) -> Exception | None:
        """Return the error when a rank has failed or left, or the time-out is over; else None."""
        if (failure := self.peer_failure()) is not None:
            return failure
        if (left := runtime.who_never_comes(self._need)) is not None:
            return RankFailedError(
                f"{self.place} can never go on with {self}: rank {left} has ended without it. "
                "Look for a rank that returned early or called sys.exit."
            )
        if time.monotonic() < self._end:
            return None
        if (lifeline := liveness.current()) is not None:
            return lifeline.explain(str(self))
        return RankFailedError(
            f"{self.place} has waited for the group's time-out in {self}, and not every rank has "
            "come. Look for the first error among the other ranks' output."
        )

    def explain(self, error: Exception) -> Exception:
        """Return our error for one of MPI's; other errors stay as they are."""
        module = mpi()
        if not isinstance(error, module.Exception):
            return error
        if error.Get_error_class() == module.ERR_TRUNCATE:
            made: Exception = CollectiveMismatchError(
                f"Rank {self._group.rank()}: a peer gave more elements to {self} than expected "
                "here. Every rank must make the same calls with the same shapes; debug=True finds "
                "the first that differs."
            )
        else:
            made = self.peer_failure() or RankFailedError(
                f"Rank {self._group.rank()} lost a peer in {self}. MPI said: {error}"
            )
        made.__cause__ = error
        return made


class MPIBackend(Backend):
    """CPU and CUDA tensors over MPI, through mpi4py.

    c10d knows it as "mpi4py": `dist.init_process_group("mpi4py", init_method="mpi://")` works in
    any script that mpirun has started, and `dist.new_group` and device meshes follow.
    """

    name: ClassVar[str] = "mpi"
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    @property
    @override
    def c10d_name(self) -> str:
        return debug_name(BACKEND_NAME) if self.debug else BACKEND_NAME

    @override
    def unavailable_reason(self) -> str | None:
        return runtime.unavailable_reason()

    @override
    def init_process_group(
        self,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        timeout: timedelta,
        store: Store | None = None,
    ) -> None:
        if store is not None:
            raise ConfigError(
                "mpi: got a store to meet at, expected none: its ranks are those that mpirun has "
                "started, and end together. Pass backend='gloo' or 'nccl' to train elastically."
            )
        _check_place(rank, world_size)
        meeting, rank, world_size = next(_meet(INIT_METHOD, timeout=timeout))
        init_default_group(
            self.c10d_name,
            store=PrefixStore("default_pg", meeting),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        address = cast(JobStore, meeting).address
        liveness.start(address, rank=rank, world_size=world_size, timeout=timeout)

    @override
    def collectives(self, group: dist.ProcessGroup) -> ExchangeCollectives:
        return exchange_collectives(group)


def _make_group(options: Any, backend_options: Any) -> Any:
    """Make this rank's handle of a group; c10d calls this function."""
    del backend_options
    _check_place(rank=ranks_of(options)[options.group_rank])
    runtime.finalize_in_order(progress.end)
    return MPIGroup(options)


def _meet(
    url: str, *, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """Make the store of a world that mpirun has started: rank 0 keeps it, MPI tells where."""
    # c10d calls this for `init_method="mpi://"` and puts what the user gave into the URL's query.
    given = dict(parse_qsl(urlparse(url).query))
    _check_place(int(given.get("rank", -1)), int(given.get("world_size", -1)))
    world = mpi().COMM_WORLD
    host, token = runtime.host_of_rank_zero(), runtime.job_token()
    remember(token)
    guard_torch()
    port = 0
    if world.rank == 0:
        port = serve(JobAddress(host=host, port=0, token=token)).port
    address = JobAddress(host=host, port=runtime.from_rank_zero(port), token=token)
    yield store_at(address, timeout), world.rank, world.size


def _check_place(rank: int = -1, world_size: int = -1) -> None:
    """Raise unless mpirun has started this rank of this world; -1 stands for nothing given."""
    world = mpi().COMM_WORLD
    if rank not in (-1, world.rank) or world_size not in (-1, world.size):
        raise ConfigError(
            f"mpi: got rank={rank}, world_size={world_size}, but mpirun has started this process "
            f"as rank {world.rank} of {world.size}. Start all ranks with one "
            "`mpirun -n N python ...`, and give no other rank or size."
        )


_c10d.register_backend(BACKEND_NAME, _make_group, ["cpu", "cuda"])
register_debug(BACKEND_NAME, _make_group, ["cpu", "cuda"])
register_rendezvous_handler("mpi", _meet)  # type: ignore[no-untyped-call]
