"""Faults to inject: fail a rank at its k-th operation, delay it, or drop it without a word."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_shard.errors import ConfigError

FaultKind = Literal["fail", "delay", "drop"]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong on one rank.

    Args:
        rank: The global rank.
        at_collective: Which of the rank's operations, counted from 1 over all its groups; sends
            and receives count, waits on the store do not.
        kind: "fail" raises `RankFailedError` there, "delay" keeps the rank from running for
            `seconds`, "drop" ends it without a word: what its peers share with it from then on
            raises `RankFailedError` on them.
        seconds: How long a delay lasts.

    Raises:
        ConfigError: A value is not one of these.
    """

    rank: int
    at_collective: int
    kind: FaultKind
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ConfigError(f"Fault: got rank={self.rank}, expected a rank from 0.")
        if self.at_collective < 1:
            raise ConfigError(
                f"Fault: got at_collective={self.at_collective}, expected 1 or more: "
                "a rank's operations are counted from 1."
            )
        if self.kind not in get_args(FaultKind):
            raise ConfigError(
                f"Fault: got kind={self.kind!r}, expected one of {get_args(FaultKind)}."
            )
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise ConfigError(f"Fault: got seconds={self.seconds}, expected a finite number >= 0.")
        if self.seconds and self.kind != "delay":
            raise ConfigError(
                f"Fault: seconds={self.seconds} needs kind='delay', got {self.kind!r}."
            )


class RankDropped(BaseException):
    """Unwinds a dropped rank; no `except Exception` of the user's stops it."""


class FaultPlan:
    """The faults of one run, by rank and operation."""

    def __init__(self, faults: Iterable[Fault], num_ranks: int) -> None:
        self._faults: dict[tuple[int, int], Fault] = {}
        for fault in faults:
            if fault.rank >= num_ranks:
                raise ConfigError(
                    f"Fault: got rank={fault.rank}, expected a rank below {num_ranks}."
                )
            self._faults[(fault.rank, fault.at_collective)] = fault
        self._counts = [0] * num_ranks

    def next_fault(self, rank: int) -> Fault | None:
        """Count one more operation of `rank` and return the fault that strikes it, if any."""
        self._counts[rank] += 1
        return self._faults.get((rank, self._counts[rank])) if self._faults else None
