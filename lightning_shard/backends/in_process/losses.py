"""Ranks that are lost to their peers: dropped, and in an elastic world failed or gone on."""

from collections.abc import Callable, Iterable

from lightning_shard.backends.in_process.channel import Channel
from lightning_shard.backends.in_process.rank import Rank, Status, rank_name
from lightning_shard.backends.in_process.rank_errors import (
    ErrorMaker,
    gone_error_maker,
    left_error_maker,
    peer_failed_error_maker,
)
from lightning_shard.backends.in_process.scheduler import Scheduler
from lightning_shard.errors import ConfigError, RankFailedError

_ENDED = (Status.GONE, Status.FAILED, Status.FINISHED)


class Losses:
    """Finds the lost ranks, for which a wait is in vain.

    Args:
        scheduler: The world's scheduler, which holds the ranks.
        is_elastic: Whether a rank that fails, ends or goes on to the next generation is lost to its
            peers. In other worlds a failure ends all ranks, and waiting for one that has ended is a
            deadlock.
    """

    def __init__(self, scheduler: Scheduler, *, is_elastic: bool) -> None:
        self._scheduler = scheduler
        self._is_elastic = is_elastic

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
        return gone_error_maker(names) if gone else left_error_maker(names)

    def _is_lost(self, rank: Rank, generation: int) -> bool:
        if not self._is_elastic:
            return rank.status is Status.GONE
        return rank.status in _ENDED or rank.left >= generation


def check_place(rank: Rank, channel: Channel, describe: Callable[[], str]) -> None:
    """Raise if this rank can call nothing in this group any more.

    Raises:
        ConfigError: The rank has left the group's generation.
        RankFailedError: A fault has broken the rank's groups.
    """
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
