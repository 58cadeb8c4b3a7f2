"""The errors that a world raises on its ranks, made for each rank when it is raised there."""

from collections.abc import Callable, Sequence

from lightning_shard.backends.mismatch import mismatch_error
from lightning_shard.errors import DeadlockError, RankFailedError

Verdict = Callable[[int, str], Exception]
"""Makes one rank's error from its number and a description of the operation it is in."""


def deadlock_verdict(report: str) -> Verdict:
    """Nobody can run; `report` has a line for each rank."""

    def make(rank: int, operation: str) -> Exception:
        return DeadlockError(
            f"Rank {rank} waits for ever in {operation}: no rank can run, and not every rank has "
            f"finished.\n{report}\n"
            "Every rank of a group must make the same calls in the same order: look for a rank "
            "that returned early or took another branch."
        )

    return make


def mismatch_verdict(problem: str) -> Verdict:
    """Two ranks met with different operations; `problem` names both, and their call sites."""

    def make(rank: int, operation: str) -> Exception:
        return mismatch_error(problem, rank, operation)

    return make


def peer_failed_verdict(failed: str, error: BaseException) -> Verdict:
    """The rank called `failed` raised `error`."""

    def make(rank: int, operation: str) -> Exception:
        made = RankFailedError(
            f"Rank {rank} cannot go on with {operation}: rank {failed} raised "
            f"{type(error).__name__}: {error}\nMend that error first; this one follows from it."
        )
        made.__cause__ = error
        return made

    return make


def gone_verdict(gone: Sequence[str]) -> Verdict:
    """The ranks called `gone` were dropped without a word."""

    def make(rank: int, operation: str) -> Exception:
        return RankFailedError(
            f"Rank {rank} cannot go on with {operation}: rank {', '.join(gone)} is gone, without "
            "a word. Start again from a checkpoint, or go on in a group without it."
        )

    return make


def left_verdict(left: Sequence[str]) -> Verdict:
    """The ranks called `left` have dropped the groups that they share with others, or ended."""

    def make(rank: int, operation: str) -> Exception:
        return RankFailedError(
            f"Rank {rank} cannot go on with {operation}: rank {', '.join(left)} has left these "
            "groups. Go on in the next generation's."
        )

    return make
