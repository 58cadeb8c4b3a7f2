"""How a rank that has raised learns whether the others have, before it tells them of its error.

    rank 0   step 7 ── raises ┐                   rank 0   step 7 ── waits for rank 1 ✗
    rank 1   step 7 ── raises ┴─> in common       rank 1   step 7 ── raises ──────────┴─> alone

Where all ranks have raised after the same collective calls, they can still do together what
callbacks do on an exception: save. Else the ranks that have not raised wait for what never comes.
"""

from collections.abc import Collection
from dataclasses import dataclass

from lightning_shard.backends.in_process.channel import Channel
from lightning_shard.backends.in_process.rank import Rank, RankPosition, Status
from lightning_shard.backends.in_process.rank_errors import peer_failed_error_maker
from lightning_shard.backends.in_process.scheduler import Scheduler


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The state of all ranks that a failing rank finds.

    Attributes:
        is_common: Whether all ranks have raised at the same place of their collective calls, so
            that their groups work still; else no group does.
        first: The exception that the first of them has raised.
        gone: Ranks that a fault has dropped.
    """

    is_common: bool
    first: BaseException
    gone: tuple[int, ...]


class Failures:
    """The place where the ranks that have raised wait for each other.

    Args:
        scheduler: The world's scheduler, which holds the ranks.
        channels: Channels of all groups of the world.
        is_elastic: Whether ranks that have not raised go on without those that have.
    """

    def __init__(
        self, scheduler: Scheduler, channels: Collection[Channel], *, is_elastic: bool
    ) -> None:
        self._scheduler, self._channels = scheduler, channels
        self._is_elastic = is_elastic
        self._is_common: dict[int, bool] = {}  # by generation

    def meet(self, rank: Rank, error: BaseException) -> Failure:
        """Let the other ranks run until each has raised, too, or has ended; called by `rank`.

        Args:
            rank: The calling rank.
            error: The exception that it has raised.
        """
        scheduler, place = self._scheduler, rank.place
        if not self._is_elastic or rank.left < place.generation:
            scheduler.await_failures(rank, error)
            if place.generation not in self._is_common:  # the first to come back looks for all
                self._is_common[place.generation] = self._have_failed_alike(place)
        thread, first = next(iter(scheduler.failures.items()), (rank.index, error))
        is_common = self._is_common.get(place.generation, False) and not scheduler.is_condemned
        if not is_common and not self._is_elastic:
            scheduler.condemn(peer_failed_error_maker(scheduler.ranks[thread].name, first))
        gone = tuple(r for r, one in enumerate(self._members(place)) if one.status is Status.GONE)
        return Failure(is_common=is_common, first=first, gone=gone)

    def is_common(self, rank: Rank, error: BaseException) -> bool:
        """Whether all ranks raise where `rank` has; if not, `rank` may go on."""
        if self.meet(rank, error).is_common:
            return True
        rank.failing = None
        self._scheduler.failures.pop(rank.index, None)
        return False

    def _members(self, place: RankPosition) -> list[Rank]:
        return [self._scheduler.ranks[thread] for thread in place.threads]

    def _have_failed_alike(self, place: RankPosition) -> bool:
        """Whether all ranks have raised, and have met in whatever collectives they have called.

        A rank that only waited for a message, as stages of a pipeline do, can still talk to the
        rest.
        """
        settled = [c.settle() for c in self._channels if c.generation == place.generation]
        members = self._members(place)
        failing = all(r.failing is not None and r.status is Status.ALIVE for r in members)
        is_common = failing and all(settled) and not self._scheduler.is_condemned
        for rank in members if is_common else ():
            rank.make_error = None
        return is_common
