"""The error of every backend when ranks of one group meet with different operations."""

from dataclasses import dataclass

from lightning_shard.errors import CollectiveMismatchError


@dataclass(frozen=True, kw_only=True)
class Side:
    """One rank's part in a disagreement.

    Attributes:
        rank: Global rank of the process.
        operation: The operation that the rank called, in words.
        site: File and line where the user's code called it.
    """

    rank: int
    operation: str
    site: str


def describe_disagreement(
    group: str, number: int, *, got: Side, expected: Side, what: str = ""
) -> str:
    """Say which two ranks disagree, and on what.

    Args:
        group: The group and its ranks, in words.
        number: Number of the operation within the group, from 1.
        got: Part of the rank whose operation differs.
        expected: Part of the rank that it differs from.
        what: The property that differs, where the two operations alone do not show it.
    """
    return (
        f"Ranks of {group} disagree at its operation number {number}{what and f': {what}'}.\n"
        f"  rank {got.rank}: got {got.operation} at {got.site}\n"
        f"  rank {expected.rank}: expected {expected.operation} at {expected.site}"
    )


def mismatch_error(problem: str, rank: int, operation: str) -> CollectiveMismatchError:
    """Make one rank's error from the `problem`, the same on each rank, and its own operation."""
    return CollectiveMismatchError(
        f"{problem}\nThis is rank {rank}, in {operation}. Every rank of a group must make the "
        "same calls in the same order, with the same shapes, dtypes and options."
    )
