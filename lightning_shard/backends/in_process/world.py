"""A world of ranks in this process: runs a function on each, and is where their calls meet."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar, cast

import torch

from lightning_shard.backends import _c10d
from lightning_shard.backends.calls import Call, Disagreement
from lightning_shard.backends.in_process.channel import Channel, Meeting
from lightning_shard.backends.in_process.faults import Fault, FaultPlan, RankDropped
from lightning_shard.backends.in_process.rank_globals import RankGlobals
from lightning_shard.backends.in_process.scheduler import Rank, Scheduler, Status, Wait
from lightning_shard.backends.in_process.store import InProcessStore
from lightning_shard.backends.in_process.verdicts import gone_verdict, mismatch_verdict
from lightning_shard.backends.mismatch import Side, describe_disagreement
from lightning_shard.errors import ConfigError, RankFailedError

T = TypeVar("T")
BACKEND_NAME = "in_process"
_JOIN_SECONDS = 1.0
_active: list["World"] = []  # the one world that runs, if any


def current_world() -> "World | None":
    """Return the in-process world that runs now, or None."""
    return _active[-1] if _active else None


def current_rank() -> int | None:
    """Return the rank that runs now in the in-process world, or None outside one."""
    return _active[-1].rank if _active else None


class World:
    """N ranks as threads of this process, one running at a time.

    Args:
        num_ranks: How many.
        faults: What goes wrong, for tests.

    Raises:
        ConfigError: `num_ranks` is not a positive integer, or a fault names no rank of these.
    """

    def __init__(self, num_ranks: int, faults: Iterable[Fault] = ()) -> None:
        if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
            raise ConfigError(f"got num_ranks={num_ranks!r}, expected an integer from 1.")
        self.num_ranks = num_ranks
        self.store = InProcessStore(self)
        self._faults = FaultPlan(faults, num_ranks)
        self._channels: dict[tuple[str, tuple[int, ...], int], Channel] = {}
        self._generations: Counter[tuple[str, tuple[int, ...], int]] = Counter()
        self._num_inits = [0] * num_ranks
        self.scheduler: Scheduler

    @property
    def rank(self) -> int:
        """The rank that runs now."""
        return self.scheduler.running.index

    # --- running -------------------------------------------------------------------------------

    def run(self, function: Callable[[int], T]) -> list[T | None]:
        """Run `function(rank)` on every rank: rank 0 on this thread, the others on threads.

        Returns:
            What each returned, in rank order; None for a rank that was dropped.

        Raises:
            ConfigError: A world runs in this process already.
            BaseException: What the first rank to fail raised, with a note that names the rank.
        """
        if _active:
            raise ConfigError(
                f"An in-process world of {_active[-1].num_ranks} ranks runs already, and this was "
                "called inside it. Worlds do not nest: call it outside, or use one world."
            )
        outer, excepthook = RankGlobals(), sys.excepthook
        self.scheduler = Scheduler(
            [Rank(i, RankGlobals.for_rank(i, self.num_ranks)) for i in range(self.num_ranks)]
        )
        _active.append(self)
        try:
            with _c10d.in_process_c10d(BACKEND_NAME, self._rendezvous):
                results = _Run(self.scheduler, function).run()
        finally:
            _active.remove(self)
            outer.load()
            sys.excepthook = excepthook
        return results

    def new_init_store(self) -> _c10d.Store:
        """Return a store for this rank's next default group; its peers get the same."""
        self._num_inits[self.rank] += 1
        return _c10d.PrefixStore(f"init{self._num_inits[self.rank]}", cast(_c10d.Store, self.store))

    def _rendezvous(self, rank: int, world_size: int) -> tuple[_c10d.Store, int, int]:
        if rank not in (-1, self.rank) or world_size not in (-1, self.num_ranks):
            raise ConfigError(
                f"init_process_group: got rank={rank}, world_size={world_size}, expected "
                f"{self.rank} and {self.num_ranks}, as in the in-process world that runs."
            )
        return self.new_init_store(), self.rank, self.num_ranks

    # --- meeting -------------------------------------------------------------------------------

    def channel(self, name: str, global_ranks: tuple[int, ...]) -> Channel:
        """Return where the ranks of a group meet; called by each as it makes the group.

        A rank's n-th group of one name and these ranks is its peers' n-th, so that a group may
        be destroyed and made again.
        """
        mine = (name, global_ranks, self.rank)
        self._generations[mine] += 1
        key = (name, global_ranks, self._generations[mine])
        return self._channels.setdefault(key, Channel(name, global_ranks))

    def post(self, channel: Channel, call: Call) -> Meeting:
        """Add a call of the running rank to its group's.

        Raises:
            CollectiveMismatchError: It differs from what a peer called.
            RankFailedError: A rank of the group has failed.
        """
        rank = self.scheduler.check_thread()

        def describe() -> str:
            return f"{call} of {channel} at {call.site}"

        self.scheduler.raise_if_condemned(rank, describe)
        self._suffer(rank, call, describe)
        self.scheduler.raise_if_condemned(rank, describe)
        try:
            meeting = channel.join(call) if call.tag is None else channel.transfer(call)
        except Disagreement as disagreement:
            problem = _describe_disagreement(channel, disagreement)
            self.scheduler.condemn(mismatch_verdict(problem))
            self.scheduler.raise_if_condemned(rank, describe)
            raise AssertionError("a condemned rank has an error") from None
        self.scheduler.note_progress()
        self._raise_if_gone(meeting, rank, describe)
        return meeting

    def wait_for(self, meeting: Meeting, call: Call) -> None:
        """Let the other ranks run until the operation is done."""
        self.scheduler.wait(
            Wait(
                meeting.is_done,
                lambda: _describe_wait(meeting, call),
                meeting.missing,
                meeting.channel.global_ranks,
            )
        )

    def wait_until(self, ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Let the other ranks run until `ready()`."""
        self.scheduler.wait(Wait(ready, describe, helpers=tuple(range(self.num_ranks))))

    def poll(self, meeting: Meeting, call: Call) -> None:
        """Let the other ranks run once."""

        def describe() -> str:
            return _describe_wait(meeting, call)

        rank = self.scheduler.check_thread()
        self.scheduler.raise_if_condemned(rank, describe)
        self._raise_if_gone(meeting, rank, describe)
        self.scheduler.yield_token(describe)

    def _raise_if_gone(self, meeting: Meeting, rank: Rank, describe: Callable[[], str]) -> None:
        """Raise if a rank that has yet to do its part never will."""
        if not meeting.done and (gone := self.scheduler.gone_members(meeting.missing())):
            raise gone_verdict(gone)(rank.index, describe())

    def _suffer(self, rank: Rank, call: Call, describe: Callable[[], str]) -> None:
        fault = self._faults.next_fault(rank.index)
        if fault is None:
            return
        if fault.kind == "drop":
            rank.status = Status.GONE
            raise RankDropped
        if fault.kind == "fail":
            raise RankFailedError(
                f"Rank {rank.index} fails on purpose at its operation {fault.at_collective}, "
                f"{describe()}: a Fault was injected."
            )
        end = time.monotonic() + fault.seconds
        self.scheduler.wait(
            Wait(
                lambda: time.monotonic() >= end,
                lambda: f"a delay of {fault.seconds} s injected before {describe()}",
                deadline=end,
            )
        )


class _Run(Generic[T]):
    """One run of a world: its threads and their results."""

    def __init__(self, scheduler: Scheduler, function: Callable[[int], T]) -> None:
        self._scheduler, self._function = scheduler, function
        self._results: list[T | None] = [None] * len(scheduler.ranks)
        self._grad_enabled = torch.is_grad_enabled()

    def run(self) -> list[T | None]:
        first, *others = self._scheduler.ranks
        threads = [
            threading.Thread(
                target=self._rank_main, args=(rank,), name=f"rank{rank.index}", daemon=True
            )
            for rank in others
        ]
        for rank, thread in zip(others, threads, strict=True):
            thread.start()
            rank.thread_id = thread.ident or 0
        first.thread_id = threading.get_ident()
        first.globals.load()
        with torch.autograd.set_multithreading_enabled(False):
            try:
                self._work(first)
            except BaseException as interruption:  # Ctrl-C just as the rank had ended
                self._scheduler.fail(first, interruption)
            self._scheduler.drain(first)
        for thread in threads:
            thread.join(_JOIN_SECONDS)
        if self._scheduler.first_failure is not None:
            rank_index, error = self._scheduler.first_failure
            error.add_note(f"This was raised on rank {rank_index} of {len(threads) + 1}.")
            raise error
        return self._results

    def _rank_main(self, rank: Rank) -> None:
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
            _c10d.forget_groups()


def _describe_wait(meeting: Meeting, call: Call) -> str:
    missing = meeting.missing()
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
