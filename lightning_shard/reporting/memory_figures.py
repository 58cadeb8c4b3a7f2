"""What ranks held beside what they were expected to hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_shard.reporting.figures_of_run import expected_of, last_of_ranks
from lightning_shard.reporting.records import Record, RunRecords

KINDS = {
    "parameters": ("parameters",),
    "gathered": ("gathered",),
    "gradients": ("gradients", "gradients_in_flight"),
    "optimizer state": ("optimizer_state",),
    "communication": ("communication",),
    "besides": ("besides",),
    "activations": ("activations",),
    "recomputed": ("recomputed",),
    "passing": ("passing",),
    "others": ("others",),
}
"""Kinds of memory, and the names that records and plans have for them."""

PERSISTENT = ("parameters", "gradients", "optimizer state")
"""Kinds that are there both when the optimizer steps and in a dry run."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One rank's memory.

    Attributes:
        rank: The global rank.
        held: Bytes by kind when the optimizer stepped last.
        expected: Bytes by kind that a dry run says, at most at one time; None without one.
        offloaded: Bytes in host memory besides.
        peak: The most bytes so far, of the device or of the process; None where unknown.
    """

    rank: int
    held: Mapping[str, float]
    expected: Mapping[str, float] | None
    offloaded: float
    peak: float | None

    def of(self, kind: str) -> float:
        """Return the bytes of a kind."""
        return self.held.get(kind, 0.0)


def by_kind(memory: Mapping[str, Any]) -> dict[str, float]:
    """Return bytes by the names of `KINDS`; kinds of which there is nothing are left out."""
    sums = {
        name: sum(float(memory.get(one) or 0) for one in names) for name, names in KINDS.items()
    }
    return {name: size for name, size in sums.items() if size}


def memory_of_ranks(run: RunRecords) -> list[RankMemory]:
    """Return each rank's memory, as it was counted last."""
    found = []
    for one in last_of_ranks(run.of("memory")):
        expected = expected_of(run, one["rank"])
        found.append(
            RankMemory(
                rank=one["rank"],
                held=by_kind(one["held"]),
                expected=None if expected is None else by_kind(expected["memory"]),
                offloaded=one["held"].get("offloaded", 0),
                peak=one.get("peak"),
            )
        )
    return found


def planned(run: RunRecords) -> dict[str, float] | None:
    """Return the bytes by kind of the fullest rank that a stored plan says; None without one."""
    chosen = chosen_of(run.plan)
    return None if chosen is None else by_kind(chosen["memory"])


def chosen_of(plan: Record | None) -> Record | None:
    """Return the figures of what a plan recommends; None where there are none."""
    chosen = (plan or {}).get("recommendation") or plan
    return chosen if isinstance(chosen, dict) and isinstance(chosen.get("memory"), dict) else None
