"""The errors that a world raises on its ranks, made for each rank when it is raised there."""

from collections.abc import Callable, Sequence
from functools import partial

from lightning_shard.backends.calls import mismatch_error
from lightning_shard.errors import DeadlockError, RankFailedError

ErrorMaker = Callable[[int, str], Exception]
"""Makes one rank's error from its number and a description of the operation it is in."""


def deadlock_error_maker(report: str) -> ErrorMaker:
    """Make the errors of a deadlock: no rank can run; `report` has a line for each rank."""

    def make(rank: int, operation: str) -> Exception:
        return DeadlockError(
            f"Rank {rank} waits for ever in {operation}: no rank can run, and not every rank has "
            f"finished.\n{report}\n"
            "Every rank of a group must make the same calls in the same order: look for a rank "
            "that returned early or took another branch."
        )

    return make


def mismatch_error_maker(problem: str) -> ErrorMaker:
    """Make the errors of two ranks' different operations; `problem` names both and their sites."""
    return partial(mismatch_error, problem)


def peer_failed_error_maker(failed: str, error: BaseException) -> ErrorMaker:
    """Make the errors of the peers of the rank named `failed`, which raised `error`."""

    def make(rank: int, operation: str) -> Exception:
        made = RankFailedError(
            f"Rank {rank} cannot go on with {operation}: rank {failed} raised "
            f"{type(error).__name__}: {error}\nMend that error first; this one follows from it."
        )
        made.__cause__ = error
        return made

    return make


def gone_error_maker(gone: Sequence[str]) -> ErrorMaker:
    """Make the errors of the peers of the ranks named `gone`, which a fault has dropped."""

    def make(rank: int, operation: str) -> Exception:
        return RankFailedError(
            f"Rank {rank} cannot go on with {operation}: rank {', '.join(gone)} is gone, without "
            "a word. Start again from a checkpoint, or go on in a group without it."
        )

    return make


def left_error_maker(left: Sequence[str]) -> ErrorMaker:
    """Make the errors of the peers of the ranks named `left`, which left their groups or ended."""

    def make(rank: int, operation: str) -> Exception:
        return RankFailedError(
            f"Rank {rank} cannot go on with {operation}: rank {', '.join(left)} has left these "
            "groups. Go on in the next generation's."
        )

    return make
