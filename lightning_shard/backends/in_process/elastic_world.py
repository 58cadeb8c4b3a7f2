"""A world whose ranks come and go: groups of one generation after the other.

    generation 1: threads 0 1 2 3 ──2 is dropped──> generation 2: threads 0 1 3 ──4 is added──> ...
                  rank    0 1 2 3                                 rank    0 1 2

What peers share with a rank that ended, or that has gone on to the next generation, raises
`RankFailedError` on them: so all ranks hear of a loss. `lightning_shard.elastic` decides who is in
the next generation.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist
from typing_extensions import override

from lightning_shard.backends import _c10d
from lightning_shard.backends.in_process.faults import Fault, num_ranks_added
from lightning_shard.backends.in_process.rank import RankPosition, Status, Wait
from lightning_shard.backends.in_process.rank_globals import assume_identity
from lightning_shard.backends.in_process.run import survivors
from lightning_shard.backends.in_process.world import World
from lightning_shard.errors import ConfigError

T = TypeVar("T")


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
        events = {Status.GONE: "died", Status.FINISHED: "ended"}
        event = events.get(self.scheduler.ranks[thread].status)
        if event is None:
            error = self.scheduler.failures[thread]
            event = f"raised {type(error).__name__}: {error}"
        for watcher in self._watchers:
            watcher(thread, event)
        self.scheduler.note_progress()
