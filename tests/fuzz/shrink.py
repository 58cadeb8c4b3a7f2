"""The fewest features of a program that still go wrong in the same way."""

from collections.abc import Callable, Sequence

from tests.fuzz.features import is_whole
from tests.fuzz.run import DEFECT, Outcome

Judge = Callable[[tuple[str, ...]], Outcome]


def shrunk(
    features: Sequence[str], outcome: Outcome, judge: Judge, max_runs: int = 60
) -> tuple[tuple[str, ...], Outcome]:
    """Drop features, halves first, while the outcome stays of its kind, within so many runs."""
    found, size = tuple(features), max(1, len(features) // 2)
    runs = 0
    while found:
        for start in range(0, len(found), size):
            fewer = found[:start] + found[start + size :]
            if not is_whole(fewer):
                continue
            if runs >= max_runs:
                return found, outcome
            runs += 1
            tried = judge(fewer)
            if alike(tried, outcome):
                found, outcome = fewer, tried
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
        size = min(size, max(1, len(found) // 2))
    return found, outcome


def alike(one: Outcome, other: Outcome) -> bool:
    """Return whether two defects are of one kind: both of values, or both the same error."""
    if one.verdict != DEFECT or other.verdict != DEFECT:
        return False
    return one.kind.split(" ")[:2] == other.kind.split(" ")[:2] or (
        one.kind.startswith("values") and other.kind.startswith("values")
    )
