"""A world of ranks in this process, which runs a function on each and has their calls meet."""

import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_shard.backends import _c10d
from lightning_shard.backends.authentication.key_values import KeyValues, RequestStore
from lightning_shard.backends.calls import (
    Call,
    Disagreement,
    Side,
    describe_disagreement,
    mismatch_error,
)
from lightning_shard.backends.in_process.channel import Channel, Meeting, is_like_gloo
from lightning_shard.backends.in_process.faults import (
    Fault,
    FaultPlan,
    RankDropped,
    num_ranks_added,
)
from lightning_shard.backends.in_process.rank import (
    GONE,
    LEFT,
    NOT_YET,
    ErrorMaker,
    Rank,
    RankPosition,
    Status,
    Wait,
    lost_error,
    peer_failed_error_maker,
    rank_name,
)
from lightning_shard.backends.in_process.rank_globals import RankGlobals, assume_identity
from lightning_shard.backends.in_process.scheduler import Failure, Failures, Scheduler
from lightning_shard.core.call_site import CallSite, find_call_site, start_thread_at
from lightning_shard.errors import ConfigError, RankFailedError

T = TypeVar("T")
_JOIN_SECONDS = 1.0


def leave_nothing_to_forks() -> None:
    """Let ranks fork from now on; call on the thread that starts them, before each run.

    A forked process has the forking thread alone. Were it to collect its parent's garbage, stores
    and groups would join threads there that it has not: it would crash, or wait for ever. So it is
    with what torch remembers for each thread of DTensors' operations.
    """
    _c10d.forget_dtensor_operations()
    _leave_garbage_to_parents()


@cache
def _leave_garbage_to_parents() -> None:
    os.register_at_fork(after_in_child=gc.freeze)


class RanksRun(Generic[T]):
    """Runs a function on the ranks: rank 0 on this thread, each other on one of its own."""

    def __init__(
        self, scheduler: Scheduler, function: Callable[[int], T], has_ended: Callable[[int], None]
    ) -> None:
        self._scheduler, self._function, self._has_ended = scheduler, function, has_ended
        self._results: list[T | None] = [None] * len(scheduler.ranks)
        self._threads: list[threading.Thread] = []
        self._site = find_call_site()
        self._grad_enabled = torch.is_grad_enabled()

    def run(self) -> list[T | None]:
        """Run until all ranks have ended."""
        leave_nothing_to_forks()
        first, *others = self._scheduler.ranks
        for rank in others:
            if rank.status is not Status.PARKED:
                self.start(rank)
        first.thread_id = threading.get_ident()
        first.globals.load()
        with torch.autograd.set_multithreading_enabled(False):
            try:
                self._work(first)
            except BaseException as interruption:  # Ctrl-C just as the rank had ended
                self._scheduler.interrupt(first, interruption)
            self._scheduler.drain(first)
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)
        self._raise_failure()
        return self._results

    def start(self, rank: Rank) -> None:
        """Start the thread of a rank, which then runs when the token comes to that rank."""
        thread = threading.Thread(
            target=self._rank_main, args=(rank,), name=f"rank{rank.index}", daemon=True
        )
        self._threads.append(thread)
        rank.status = Status.ALIVE
        thread.start()
        rank.thread_id = thread.ident or 0

    def _rank_main(self, rank: Rank) -> None:
        start_thread_at(self._site)
        self._scheduler.sleep_until_running(rank)
        torch.set_grad_enabled(self._grad_enabled)
        with torch.autograd.set_multithreading_enabled(False):
            self._work(rank)
        if self._scheduler.running is rank:  # else it was abandoned
            self._scheduler.leave(rank)

    def _work(self, rank: Rank) -> None:
        try:
            self._results[rank.index] = self._function(rank.index)
        except RankDropped:
            rank.status = Status.GONE
        except BaseException as error:
            if self._scheduler.running is rank:
                self._scheduler.fail(rank, error)
        else:
            rank.status = Status.FINISHED
        if self._scheduler.running is rank:
            if rank.status is not Status.GONE:  # of that the world has told when it came
                self._has_ended(rank.index)
            _c10d.forget_groups()

    def _raise_failure(self) -> None:
        scheduler, failures = self._scheduler, list(self._scheduler.failures.items())
        if scheduler.is_condemned:  # what others had survived before is not the reason
            failures = [one for one in failures if one[0] not in scheduler.survived]
        elif survivors(scheduler.ranks):
            return
        else:  # to end a process is no failure: only where there is nothing else to say
            failures.sort(key=lambda one: isinstance(one[1], SystemExit))
        for index, error in failures[:1]:
            error.add_note(f"This was raised on rank {index} of {len(self._threads) + 1}.")
            raise error


def survivors(ranks: list[Rank]) -> list[int]:
    """Return the threads that came to the end in the last generation, in the order of its ranks."""
    last = max(rank.place.generation for rank in ranks)
    ended = [r for r in ranks if r.status is Status.FINISHED and r.place.generation == last]
    return [rank.index for rank in sorted(ended, key=lambda rank: rank.place.rank)]


class Termination:
    """Counts the steps of all ranks of a world, and says where SIGTERM stops them.

        rank 0   step 7 ── step 8 ──────────────── stops before step 9
        rank 1   step 7 ──────── SIGTERM, step 8 ── stops before step 9

    The handler runs on the main thread, rank 0's, and only takes note. The first rank that begins a
    step afterwards says where all stop: before the first that nobody has begun.

    Attributes:
        is_ending: Whether the ranks stop, so that a signal that comes again changes nothing.
    """

    def __init__(self) -> None:
        self.was_terminated = self.requeues = self.is_ending = False
        self._steps: Counter[int] = Counter()  # by thread
        self._stop_step: int | None = None
        self._asked: Scheduler | None = None

    def announce_requeue(self) -> None:
        """Have all ranks stop, to be started again; called by a signal's handler."""
        self.requeues = self.requeues or self._stop_step is None

    def announce_termination(self) -> None:
        """Have all ranks stop, or leave at the next boundary; called by a signal's handler."""
        self.was_terminated = True
        for rank in self._asked.ranks if self._asked is not None else ():
            rank.is_asked_to_leave = True

    def ask_to_leave(self, scheduler: Scheduler) -> None:
        """Have ranks asked to leave rather than stopped: they have boundaries of their own."""
        self._asked = scheduler

    def step(self, thread: int) -> bool:
        """Note that a rank is about to begin a step; return whether all stop before it."""
        self._steps[thread] += 1
        if (self.was_terminated or self.requeues) and self._stop_step is None:
            others = [steps for one, steps in self._steps.items() if one != thread]
            self._stop_step = max(self._steps[thread], max(others, default=0) + 1)
        self.is_ending = self.is_ending or self.stops(thread)
        return self.stops(thread)

    def stops(self, thread: int) -> bool:
        """Whether a rank has come to the step before which all stop."""
        return self._stop_step is not None and self._steps[thread] >= self._stop_step


class RanksTermination:
    """One rank's view of the `Termination`, as a `Lifeline` is to ranks that are processes."""

    terminated_rank: int | None = None  # all ranks at once

    def __init__(self, shared: Termination, thread: int) -> None:
        self._shared, self._thread = shared, thread

    @property
    def was_terminated(self) -> bool:
        """Whether this process has been sent SIGTERM."""
        return self._shared.was_terminated

    @property
    def requeues(self) -> bool:
        """Whether all ranks stop because SLURM will start the job again."""
        return self._shared.requeues

    @property
    def stops(self) -> bool:
        """Whether this rank has come to the step before which all ranks stop."""
        return self._shared.stops(self._thread)

    def step(self) -> bool:
        """Begin a step of the run; return whether to stop before it, as every rank does."""
        return self._shared.step(self._thread)


BACKEND_NAME = "in_process"
_active: list["World"] = []  # the one world that runs, if any
_ENDED = (Status.GONE, Status.FAILED, Status.FINISHED)


class InProcessStore(RequestStore):
    """The store of one world."""

    def __init__(self, world: "World") -> None:
        super().__init__()
        self._world = world
        self._key_values = KeyValues(lambda: world.scheduler.note_progress())

    @override
    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set; if not at once, the other ranks run once before the answer."""
        if not super().check(keys):
            site = find_call_site()
            self._world.scheduler.yield_token(lambda: _describe("check", keys, site))
        return super().check(keys)

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Let the other ranks run until all keys are set."""
        if not super().check(keys):
            has, site = super().check, find_call_site()
            self._world.wait_until(lambda: has(keys), lambda: _describe("wait", keys, site))

    @override
    def _get(self, keys: Sequence[str], timeout: timedelta | None) -> list[str]:
        for key in keys:
            self.wait([key])
        values: list[str] = self._ask("get", keys=list(keys))
        return values

    @override
    def _ask(self, kind: str, **told: Any) -> Any:
        answer = self._key_values.answer({"kind": kind, **told})
        assert answer is not None  # only a `get` waits, for keys that are set by now
        return answer["answer"]


def _describe(method: str, keys: Sequence[str], site: CallSite) -> str:
    return f"store.{method}({', '.join(keys)}) at {site}"


class Losses:
    """Finds the lost ranks, for which a wait is in vain.

    Attributes:
        are_possible: Whether any rank has ended or left its groups, without which none is lost.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.are_possible = False

    def among(self, channel: Channel, members: Iterable[int]) -> ErrorMaker | None:
        """Return the maker of the error of a wait for these group ranks; None when none is lost."""
        return self._error_maker(
            [(channel.threads[m], channel.global_ranks[m]) for m in members], channel.generation
        )

    def in_default_group(self, rank: Rank) -> ErrorMaker | None:
        """Return the maker of the error of a wait for any rank of the default group, or None."""
        place = rank.place
        return self._error_maker(
            [(thread, r) for r, thread in enumerate(place.threads)], place.generation
        )

    def _error_maker(self, peers: Iterable[tuple[int, int]], generation: int) -> ErrorMaker | None:
        """Return the maker of the worst loss's error among these peers: (thread, global rank)."""
        ranks = self._scheduler.ranks
        lost = [p for p in peers if self._is_lost(ranks[p[0]], generation)]
        if not lost:
            return None
        for thread, number in lost:
            if ranks[thread].status is Status.FAILED:
                return peer_failed_error_maker(
                    rank_name(number, thread), self._scheduler.failures[thread]
                )
        gone = [p for p in lost if ranks[p[0]].status is Status.GONE]
        names = [rank_name(number, thread) for thread, number in gone or lost]
        return partial(lost_error, names, GONE if gone else LEFT)

    def _is_lost(self, rank: Rank, generation: int) -> bool:
        if not self._scheduler.is_elastic:
            return rank.status is Status.GONE
        return rank.status in _ENDED or rank.left >= generation


def check_place(rank: Rank, channel: Channel, describe: Callable[[], str]) -> None:
    """Raise if this rank can call nothing in this group any more."""
    if rank.left >= channel.generation:
        raise ConfigError(
            f"Rank {rank.name} called {describe()}, expected one of the generation's groups that "
            f"it is in: it has left those up to generation {rank.left}."
        )
    if rank.broken >= channel.generation:
        raise RankFailedError(
            f"Rank {rank.name} cannot go on with {describe()}: a Fault that was injected has "
            f"broken its groups of generation {rank.broken}. Go on in the next generation's."
        )


def current_world() -> "World | None":
    """Return the in-process world that runs now, or None."""
    return _active[-1] if _active else None


def current_rank() -> int | None:
    """Return the rank that runs now in the in-process world, or None outside one."""
    return _active[-1].rank if _active else None


class World:
    """N ranks as threads of this process, one running at a time, and spares that a fault adds."""

    is_elastic: ClassVar[bool] = False

    def __init__(
        self,
        num_ranks: int,
        faults: Iterable[Fault] = (),
        *,
        num_spares: int = 0,
        struck: list[Fault] | None = None,
    ) -> None:
        if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
            raise ConfigError(f"got num_ranks={num_ranks!r}, expected an integer from 1.")
        self.num_threads = num_ranks + num_spares
        self.store = InProcessStore(self)
        self.faults = FaultPlan(faults, self.num_threads, is_elastic=self.is_elastic, struck=struck)
        self.num_first_ranks = num_ranks
        self.is_like_gloo = is_like_gloo()
        self._channels: dict[tuple[str, str, tuple[int, ...], int], Channel] = {}
        self.termination = Termination()
        self._failures: Failures
        self._losses: Losses
        self._run: RanksRun[Any]
        self.scheduler: Scheduler

    @property
    def rank(self) -> int:
        """The number of the rank that runs now."""
        return self.scheduler.running.place.rank

    @property
    def num_ranks(self) -> int:
        """The number of ranks, as the one that runs now knows it."""
        if not hasattr(self, "scheduler"):
            return self.num_first_ranks
        return self.scheduler.running.place.num_ranks

    @property
    def group_rank(self) -> tuple[int, int]:
        """The running rank's number in its default group, and that group's size."""
        rank = self.scheduler.running
        return rank.place.threads.index(rank.index), len(rank.place.threads)

    # --- running -------------------------------------------------------------------------------

    def run(self, function: Callable[[int], T]) -> list[T | None]:
        """Run `function(rank)` on every rank: rank 0 on this thread, the others on threads.

        Returns:
            The function's result on each rank, in rank order; None for a rank that was dropped.

        Raises:
            ConfigError: A world runs in this process already.
            BaseException: The error of the first rank to fail, with a note that names the rank.
        """
        if _active:
            raise ConfigError(
                f"An in-process world of {_active[-1].num_ranks} ranks runs already, and this was "
                "called inside it. Worlds do not nest: call it outside, or use one world."
            )
        outer, excepthook = RankGlobals(), sys.excepthook
        ranks = [self._make_rank(index) for index in range(self.num_threads)]
        self.scheduler = Scheduler(ranks, is_elastic=self.is_elastic)
        self._losses = Losses(self.scheduler)
        self._failures = Failures(self.scheduler, self._channels.values())
        run = self._run = RanksRun(self.scheduler, function, self.has_ended)
        _active.append(self)
        try:
            with _c10d.in_process_c10d(BACKEND_NAME, self._rendezvous):
                results = run.run()
        finally:
            _active.remove(self)
            outer.load()
            sys.excepthook = excepthook
        return results

    def _make_rank(self, index: int) -> Rank:
        size = self.num_first_ranks
        is_spare = index >= size
        place = RankPosition(index, size, (index,) if is_spare else tuple(range(size)))
        rank = Rank(index, RankGlobals.for_rank(index, size), place)
        if is_spare:
            rank.status = Status.PARKED
        return rank

    def ranks_termination(self) -> RanksTermination:
        """Return the running rank's view of the end of this process by SIGTERM."""
        return RanksTermination(self.termination, self.scheduler.running.index)

    def await_failures(self, error: BaseException) -> Failure:
        """Let the others run until each has raised, too, or has ended; see `Failures.meet`."""
        return self._failures.meet(self.scheduler.check_thread(), error)

    def has_ended(self, thread: int) -> None:
        """Take note that the rank of this thread is gone or that its function has ended."""
        self._losses.are_possible = True

    def new_init_store(self) -> _c10d.Store:
        """Return a store for this rank's next default group; its peers get the same."""
        place = self.scheduler.running.place
        place.num_inits += 1
        prefix = f"{place.name}, init {place.num_inits}"
        return _c10d.PrefixStore(prefix, cast(_c10d.Store, self.store))

    def _rendezvous(self, rank: int, world_size: int) -> tuple[_c10d.Store, int, int]:
        own_rank, size = self.group_rank
        if rank not in (-1, own_rank) or world_size not in (-1, size):
            raise ConfigError(
                f"init_process_group: got rank={rank}, world_size={world_size}, expected "
                f"{own_rank} and {size}, as in the in-process world that runs."
            )
        return self.new_init_store(), own_rank, size

    # --- meeting -------------------------------------------------------------------------------

    def channel(self, name: str, global_ranks: tuple[int, ...]) -> Channel:
        """Return the channel where a group's ranks meet; each calls as it makes the group.

        A rank's n-th group of one name is its peers' n-th: a group may be destroyed and made again.
        """
        place = self.scheduler.running.place
        place.num_made[name, global_ranks] += 1
        key = (place.name, name, global_ranks, place.num_made[name, global_ranks])
        if (channel := self._channels.get(key)) is None:
            threads = tuple(place.threads[rank] for rank in global_ranks)
            channel = Channel(
                name, global_ranks, threads, place.generation, is_like_gloo=self.is_like_gloo
            )
            self._channels[key] = channel
        place.channels.append(channel)
        return channel

    def post(self, channel: Channel, call: Call) -> Meeting:
        """Add a call of the running rank to the operations of its group."""
        rank = self.scheduler.check_thread()

        def describe() -> str:
            return f"{call} of {channel} at {call.site}"

        self.scheduler.raise_if_condemned(rank, describe)
        check_place(rank, channel, describe)
        self._suffer(rank, describe)
        self.scheduler.raise_if_condemned(rank, describe)
        try:
            meeting = channel.join(call) if call.tag is None else channel.transfer(call)
        except Disagreement as disagreement:
            problem = _describe_disagreement(channel, disagreement)
            self.scheduler.condemn(partial(mismatch_error, problem))
            self.scheduler.raise_if_condemned(rank, describe)
            raise AssertionError("a condemned rank has an error") from None
        self.scheduler.note_progress()
        self._raise_if_lost(meeting, call, rank, describe)
        return meeting

    def wait_for(self, meeting: Meeting, call: Call) -> None:
        """Let the other ranks run until the operation is done."""
        rank, everybody = self.scheduler.running, range(len(meeting.channel.threads))
        self.scheduler.wait(
            Wait(
                meeting.is_done,
                lambda: _describe_wait(meeting, call),
                lost=partial(self._loss, meeting, call, rank),
                forsaken=partial(self._losses.among, meeting.channel, everybody),
            )
        )

    def wait_until(self, ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Let the other ranks run until `ready()`."""
        rank = self.scheduler.running
        self.scheduler.wait(
            Wait(ready, describe, forsaken=partial(self._losses.in_default_group, rank))
        )

    def poll(self, meeting: Meeting, call: Call) -> None:
        """Let the other ranks run once, before a rank is told whether the operation is done."""

        def describe() -> str:
            return _describe_wait(meeting, call)

        rank = self.scheduler.check_thread()
        self.scheduler.raise_if_condemned(rank, describe)
        self._raise_if_lost(meeting, call, rank, describe)
        self.scheduler.yield_token(describe)

    def _loss(self, meeting: Meeting, call: Call, rank: Rank) -> ErrorMaker | None:
        """Return the maker of the error of waiting for `meeting`, if a rank never does its part.

        The waiting rank itself counts as one if it has left the group meanwhile.
        """
        if meeting.done or not self._losses.are_possible:  # else each call looks at all peers
            return None
        members = meeting.missing()
        if rank.left >= meeting.channel.generation:
            members = (call.rank, *members)
        return self._losses.among(meeting.channel, members)

    def _raise_if_lost(
        self, meeting: Meeting, call: Call, rank: Rank, describe: Callable[[], str]
    ) -> None:
        if (make_error := self._loss(meeting, call, rank)) is not None:
            raise make_error(rank.place.rank, describe())

    def _suffer(self, rank: Rank, describe: Callable[[], str]) -> None:
        fault = self.faults.next_fault(rank.index)
        if fault is None:
            return
        match fault.kind:
            case "drop":
                rank.status = Status.GONE
                self.has_ended(rank.index)
                raise RankDropped
            case "fail":
                rank.broken = rank.place.generation if self.is_elastic else NOT_YET
                step = "" if fault.at_step is None else f" of step {fault.at_step}"
                raise RankFailedError(
                    f"Rank {rank.name} fails on purpose at its operation {fault.at_collective}"
                    f"{step}, {describe()}: a Fault was injected."
                )
            case "leave":
                rank.is_asked_to_leave = True
            case "delay":
                self._delay(fault, describe)

    def _delay(self, fault: Fault, describe: Callable[[], str]) -> None:
        end = time.monotonic() + fault.seconds
        self.scheduler.wait(
            Wait(
                lambda: time.monotonic() >= end,
                lambda: f"a delay of {fault.seconds} s injected before {describe()}",
                deadline=end,
            )
        )


def _describe_wait(meeting: Meeting, call: Call) -> str:
    missing = [meeting.channel.global_ranks[member] for member in meeting.missing()]
    waited = f", waiting for rank {', '.join(map(str, missing))}" if missing else ""
    return f"{call}, number {meeting.number} of {meeting.channel} at {call.site}{waited}"


def _describe_disagreement(channel: Channel, disagreement: Disagreement) -> str:
    got, expected = (
        Side(rank=channel.global_ranks[call.rank], operation=str(call), site=str(call.site))
        for call in (disagreement.got, disagreement.expected)
    )
    number = channel.count(disagreement.got.rank)
    return describe_disagreement(
        str(channel), number, got=got, expected=expected, what=disagreement.what
    )


class ElasticWorld(World):
    """N ranks and some spare ones, as threads of this process, one running at a time.

    A spare rank begins when a fault adds it, alone: with a default group of its own, as rank 0 of
    1, while its number is its thread's, so that it does nothing that is rank 0's to do.
    """

    is_elastic: ClassVar[bool] = True

    def __init__(
        self, num_ranks: int, faults: Iterable[Fault] = (), *, struck: list[Fault] | None = None
    ) -> None:
        faults = tuple(faults)
        num_spares = num_ranks_added(faults, num_ranks)
        super().__init__(num_ranks, faults, num_spares=num_spares, struck=struck)
        self._shared: dict[type, Any] = {}
        self._watchers: list[Callable[[int, str], None]] = []

    # --- what any rank may ask or tell ----------------------------------------------------------

    @property
    def thread(self) -> int:
        """Number of the running rank's thread, which it keeps for good."""
        return self.scheduler.running.index

    @property
    def is_spare(self) -> bool:
        """Whether the running rank was added after the world began."""
        return self.thread >= self.num_first_ranks

    @property
    def is_gone(self) -> bool:
        """Whether the running rank was dropped and is only being unwound."""
        return self.scheduler.running.status is Status.GONE

    @property
    def is_asked_to_leave(self) -> bool:
        """Whether the running rank is to leave in order at the next boundary."""
        return self.scheduler.running.is_asked_to_leave

    def shared(self, kind: type[T], make: Callable[[], T]) -> T:
        """Return the one object of this kind that the ranks share; the first to ask makes it."""
        if kind not in self._shared:
            self._shared[kind] = make()
        made: T = self._shared[kind]
        return made

    def call_when_ended(self, watcher: Callable[[int, str], None]) -> None:
        """Have `watcher` called with the thread of each rank that ends, and its end in words."""
        self._watchers.append(watcher)

    def begin_step(self, step: int) -> None:
        """Note that the running rank begins an optimizer step; ranks may be added now."""
        for thread in self.faults.begin_step(self.thread, step):
            self._run.start(self.scheduler.ranks[thread])

    def wait_for_news(
        self,
        ready: Callable[[], bool],
        describe: Callable[[], str],
        at_standstill: Callable[[], bool],
    ) -> None:
        """Let the other ranks run until `ready()`, which no single rank's loss makes impossible.

        Where no rank can run, `at_standstill` lets time pass, and says whether anything happened.
        """
        self.scheduler.wait(Wait(ready, describe, at_standstill=at_standstill))

    def all_raise(self, error: BaseException) -> bool:
        """Whether all ranks of the generation raise where this one does; if not, it may go on."""
        return self._failures.is_common(self.scheduler.check_thread(), error)

    # --- generations ----------------------------------------------------------------------------

    def leave_generation(self, number: int) -> None:
        """Leave, as the running rank, the groups of all generations up to `number`."""
        rank = self.scheduler.running
        rank.left = max(rank.left, number)
        self._losses.are_possible = True
        for channel in rank.place.channels if rank.place.generation <= number else ():
            channel.withdraw(channel.threads.index(rank.index))
        rank.place.channels.clear()
        self.scheduler.note_progress()

    def drop_groups(self) -> None:
        """Leave the running rank's generation and forget its groups."""
        self.leave_generation(self.scheduler.running.place.generation)
        _c10d.forget_groups()

    def reconfigure(self, number: int, threads: Sequence[int]) -> None:
        """Give the running rank its place in another generation, before it makes its groups.

        Rank r of its default group is thread `threads[r]`, the same on each rank.
        """
        rank = self.scheduler.check_thread()
        if rank.index not in threads or number <= rank.left or dist.is_initialized():
            raise ConfigError(
                f"Rank {rank.name}: got generation {number} of the threads {list(threads)}, "
                f"expected a generation after {rank.left} with thread {rank.index} in it, after "
                "drop_groups()."
            )
        place = RankPosition(list(threads).index(rank.index), len(threads), tuple(threads), number)
        rank.place = place
        assume_identity(place.rank, place.num_ranks)

    # --- ends ----------------------------------------------------------------------------------

    def survivors(self) -> list[int]:
        """Return the threads that ended well in the last generation, in the order of its ranks."""
        return survivors(self.scheduler.ranks)

    def has_ended_well(self, thread: int) -> bool:
        """Whether the function of this thread's rank has returned."""
        return self.scheduler.ranks[thread].status is Status.FINISHED

    def failures_of_members(self) -> dict[int, Exception]:
        """Return by thread the errors of ranks that took part, but not a process's exit."""
        return {
            thread: error
            for thread, error in self.scheduler.failures.items()
            if self.scheduler.ranks[thread].place.generation > 0 and isinstance(error, Exception)
        }

    @override
    def has_ended(self, thread: int) -> None:
        super().has_ended(thread)
        events = {Status.GONE: "died", Status.FINISHED: "ended"}
        event = events.get(self.scheduler.ranks[thread].status)
        if event is None:
            error = self.scheduler.failures[thread]
            event = f"raised {type(error).__name__}: {error}"
        for watcher in self._watchers:
            watcher(thread, event)
        self.scheduler.note_progress()
