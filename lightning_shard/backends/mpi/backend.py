"""MPI: ranks started by mpirun or a cluster's own launcher.

MPI makes progress when it is called. A waiting rank calls it all the time; otherwise a thread does
so every half a millisecond, so that no peer waits for a rank that is busy elsewhere.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
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
from lightning_shard.backends.call_site import CallSite, find_call_site
from lightning_shard.backends.calls import Call
from lightning_shard.backends.debug_wrapper import debug_name, exchange_collectives, register_debug
from lightning_shard.backends.exchange import ExchangeCollectives
from lightning_shard.backends.group_handle import FlightWork, InFlight, OperationWatch, ranks_of
from lightning_shard.backends.meeting_place import serve
from lightning_shard.backends.mpi import runtime
from lightning_shard.backends.mpi.operations import OPERATIONS, GroupOfRanks, Steps
from lightning_shard.backends.mpi.runtime import (
    COLLECTIVE,
    MADE,
    Need,
    given_up,
    is_cuda_aware,
    lock,
    mpi,
)
from lightning_shard.backends.objects import guard_torch
from lightning_shard.backends.packing import raw, write
from lightning_shard.backends.python_group import ANY_SOURCE, PythonGroup
from lightning_shard.backends.shapes import FIRST_RESERVED_TAG
from lightning_shard.backends.streams import drain_streams
from lightning_shard.errors import CollectiveMismatchError, ConfigError, RankFailedError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

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

    def __init__(self, steps: Generator[list[Any], Any, None], watch: "_MPIOperationWatch") -> None:
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


def must_stage(tensors: Sequence[Tensor]) -> bool:
    """Whether these tensors lie where MPI cannot reach; the first time, rank 0 warns."""
    if all(tensor.device.type == "cpu" for tensor in tensors) or is_cuda_aware():
        return False
    _warn_once()
    return True


def staged(
    operation: Callable[[GroupOfRanks, Call], Steps], group: GroupOfRanks, call: Call
) -> Steps:
    """Carry `call` out on copies in host memory, and copy the results back."""
    with torch.inference_mode():
        host = replace(
            call,
            inputs=[raw(tensor).cpu() for tensor in call.inputs],
            outputs=[raw(tensor).cpu() for tensor in call.outputs],
        )
    yield from operation(group, host)
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

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the results are there; after a `timeout` of its own the operation goes on."""
        end = time.monotonic() + timeout.total_seconds() if timeout else None
        polls = 0
        while not self._flight.poll():
            _pause(polls)
            polls += 1
            if polls > _YIELDS or polls % 100 == 0:
                self._flight.check()
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"{self._call} at {self._call.site} took longer than {timeout}.")
        if self._flight.error is not None:
            raise self._flight.error
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

    backend_name: ClassVar[str] = BACKEND_NAME

    def __init__(
        self,
        name: str,
        global_ranks: tuple[int, ...],
        rank: int,
        timeout: timedelta,
        store: Store,
    ) -> None:
        super().__init__(name, global_ranks, rank, timeout)
        self._numbers = count()
        self._largest_tag = runtime.largest_tag()
        self._tally = runtime.departures.tally(name)
        self._await_members(store)
        tag = sum(name.encode()) % self._largest_tag  # tells groups apart that are made at once
        self.comm: Intracomm = runtime.communicator(global_ranks, tag)
        self.inner: Intracomm = runtime.communicator(global_ranks, tag)

    def _await_members(self, store: Store) -> None:
        """Wait until every rank of the group has come to make it.

        Making a communicator waits inside MPI, where this rank's operations in flight stand still.
        """
        self._tally[MADE] += 1
        need = Need(
            group=self._name, ranks=self.global_ranks, parts=[MADE], number=self._tally[MADE]
        )
        watch = _MPIOperationWatch(self, "new_group", find_call_site(), need, self.timeout)
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
        with runtime.lock:  # operations are counted in the order in which they begin
            own, need = self._need(call)
            watch = _MPIOperationWatch(self, call, call.site, need, self.timeout)
            if (failure := watch.peer_failure()) is not None:
                raise failure
            try:
                flight = MPIFlight(self._steps(call), watch)
            except runtime.mpi().Exception as error:
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
        operation = OPERATIONS[call.op]
        yield from staged(operation, self, call) if must_stage(tensors) else operation(self, call)
        drain_streams(tensors)  # who waits may read the results on any stream

    def shutdown(self) -> None:
        """Give the communicators back; the group is not used afterwards."""
        for comm in (self.comm, self.inner):
            runtime.free(comm)


class _MPIOperationWatch(OperationWatch):
    """Watches one operation of this rank for the flight, and makes its errors."""

    def __init__(
        self, group: MPIGroup, operation: Call | str, site: CallSite, need: Need, timeout: timedelta
    ) -> None:
        super().__init__(group, operation, site)
        self._need = need
        self._end = time.monotonic() + timeout.total_seconds()

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
        module = runtime.mpi()
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
        liveness.start(meeting, address, rank=rank, world_size=world_size, timeout=timeout)

    @override
    def collectives(self, group: dist.ProcessGroup) -> ExchangeCollectives:
        return exchange_collectives(group)


def _make_group(options: Any, backend_options: Any) -> Any:
    """Make this rank's handle of a group; c10d calls this function."""
    del backend_options
    ranks = ranks_of(options)
    _check_place(rank=ranks[options.group_rank])
    runtime.finalize_in_order(progress.end)
    rank, timeout, store = options.group_rank, options.timeout, options.store
    return MPIGroup(options.group_id, ranks, rank, timeout, store)


def _meet(
    url: str, *, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """Make the store of a world that mpirun has started: rank 0 keeps it, MPI tells where.

    c10d calls this for `init_method="mpi://"` and puts what the user gave into the URL's query.
    """
    given = dict(parse_qsl(urlparse(url).query))
    _check_place(int(given.get("rank", -1)), int(given.get("world_size", -1)))
    world = runtime.mpi().COMM_WORLD
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
    world = runtime.mpi().COMM_WORLD
    if rank not in (-1, world.rank) or world_size not in (-1, world.size):
        raise ConfigError(
            f"mpi: got rank={rank}, world_size={world_size}, but mpirun has started this process "
            f"as rank {world.rank} of {world.size}. Start all ranks with one "
            "`mpirun -n N python ...`, and give no other rank or size."
        )


_c10d.register_backend(BACKEND_NAME, _make_group, ["cpu", "cuda"])
register_debug(BACKEND_NAME, _make_group, ["cpu", "cuda"])
register_rendezvous_handler("mpi", _meet)  # type: ignore[no-untyped-call]
