"""One run of a world: its threads, their results, and the ranks that have survived."""

import gc
import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import torch

from lightning_shard.backends import _c10d
from lightning_shard.backends.call_site import find_call_site, start_thread_at
from lightning_shard.backends.in_process.faults import RankDropped
from lightning_shard.backends.in_process.rank import Rank, Status
from lightning_shard.backends.in_process.scheduler import Scheduler

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
        self,
        scheduler: Scheduler,
        function: Callable[[int], T],
        has_ended: Callable[[int], None],
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
