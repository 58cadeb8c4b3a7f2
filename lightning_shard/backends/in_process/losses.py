"""Who will never do his part: dropped ranks, and in an elastic world those that failed or left."""

from collections.abc import Callable, Iterable

from lightning_shard.backends.in_process.channel import Channel
from lightning_shard.backends.in_process.rank import Rank, Status, rank_name
from lightning_shard.backends.in_process.scheduler import Scheduler
from lightning_shard.backends.in_process.verdicts import (
    Verdict,
    gone_verdict,
    left_verdict,
    peer_failed_verdict,
)
from lightning_shard.errors import ConfigError, RankFailedError

_ENDED = (Status.GONE, Status.FAILED, Status.FINISHED)


class Losses:
    """Finds the ranks that a wait is in vain for.

    Args:
        scheduler: Has the ranks.
        is_elastic: Whether a rank that fails, ends or goes on to the next generation is lost to its
            peers. In other worlds a failure ends all ranks, and waiting for one that has ended is a
            deadlock.
    """

    def __init__(self, scheduler: Scheduler, *, is_elastic: bool) -> None:
        self._scheduler = scheduler
        self._is_elastic = is_elastic

    def among(self, channel: Channel, members: Iterable[int]) -> Verdict | None:
        """Return the error of a wait for these ranks of a group, if one of them is lost."""
        return self._verdict(
            [(channel.threads[m], channel.global_ranks[m]) for m in members], channel.generation
        )

    def in_default_group(self, rank: Rank) -> Verdict | None:
        """Return the error of a wait for any rank of this one's default group, if one is lost."""
        place = rank.place
        return self._verdict(
            [(thread, r) for r, thread in enumerate(place.threads)], place.generation
        )

    def _verdict(self, peers: Iterable[tuple[int, int]], generation: int) -> Verdict | None:
        """Return the error that the worst loss among (thread, global rank) makes."""
        ranks = self._scheduler.ranks
        lost = [p for p in peers if self._is_lost(ranks[p[0]], generation)]
        if not lost:
            return None
        for thread, number in lost:
            if ranks[thread].status is Status.FAILED:
                return peer_failed_verdict(
                    rank_name(number, thread), self._scheduler.failures[thread]
                )
        gone = [p for p in lost if ranks[p[0]].status is Status.GONE]
        names = [rank_name(number, thread) for thread, number in gone or lost]
        return gone_verdict(names) if gone else left_verdict(names)

    def _is_lost(self, rank: Rank, generation: int) -> bool:
        if not self._is_elastic:
            return rank.status is Status.GONE
        return rank.status in _ENDED or rank.left >= generation


def check_place(rank: Rank, channel: Channel, describe: Callable[[], str]) -> None:
    """Raise if this rank can call nothing in this group any more.

    Raises:
        ConfigError: It has left the group's generation.
        RankFailedError: A fault has broken its groups.
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
