"""Faults to inject: fail a rank at its k-th operation, delay it, drop it, bring a spare one in."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_shard.core.states import having
from lightning_shard.errors import ConfigError

FaultKind = Literal["fail", "delay", "drop", "add", "leave"]
_ELASTIC_KINDS = ("add", "leave")
_injected: ContextVar["tuple[tuple[Fault, ...], list[Fault]]"] = ContextVar("injected_faults")


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong on one rank, or a rank that comes or goes.

    Args:
        rank: The rank's number when the world began, which is its thread's for good; other ranks'
            coming and going does not change it. A rank that is added is numbered from the number
            of ranks up.
        at_collective: Which of the rank's operations, counted from 1 over all its groups; sends
            and receives count, waits on the store do not.
        kind: "fail" raises `RankFailedError` there, "delay" keeps the rank from running for
            `seconds`, "drop" ends it without a word: what its peers share with it from then on
            raises `RankFailedError` on them. In an elastic world a rank that "fails" can do nothing
            more in its generation's groups, and there are two more kinds: "leave" asks the rank to
            leave in order at the next boundary, and "add" brings a spare rank to life as soon as
            any rank begins step `at_step`.
        seconds: Length of a delay, in seconds.
        at_step: Count the operations from where the rank begins this optimizer step instead. A step
            may be done again after a loss; the fault strikes once.

    Raises:
        ConfigError: A value is not one of these.
    """

    rank: int
    at_collective: int
    kind: FaultKind
    seconds: float = 0.0
    at_step: int | None = None

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
        self._check_time()

    def _check_time(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise ConfigError(f"Fault: got seconds={self.seconds}, expected a finite number >= 0.")
        if self.seconds and self.kind != "delay":
            raise ConfigError(
                f"Fault: seconds={self.seconds} needs kind='delay', got {self.kind!r}."
            )
        if self.at_step is not None and self.at_step < 0:
            raise ConfigError(f"Fault: got at_step={self.at_step}, expected a step from 0.")
        if self.kind == "add" and (self.at_step is None or self.at_collective != 1):
            raise ConfigError(
                f"Fault: got kind='add' with at_collective={self.at_collective}, "
                f"at_step={self.at_step}, expected at_collective=1 and a step: a rank is added as "
                "any rank begins that step."
            )


class RankDropped(BaseException):
    """Unwinds a dropped rank; no `except Exception` of the user's stops it."""


@contextmanager
def injected_faults(faults: Iterable[Fault]) -> Iterator[list[Fault]]:
    """Have these faults strike in every in-process launch of a trainer; each time anew.

        with injected_faults([Fault(2, 1, "drop", at_step=5), Fault(4, 1, "add", at_step=9)]):
            trainer.fit(model)

    Inside another such context only the inner one's faults strike.

    Args:
        faults: The faults, each of which strikes once in a launch.

    Yields:
        The faults that have struck so far, in order, over all launches.
    """
    struck: list[Fault] = []
    with having(_injected, (tuple(faults), struck)):
        yield struck


def faults_to_inject() -> tuple[tuple[Fault, ...], list[Fault]]:
    """Return the faults of the surrounding `injected_faults`, and its list of struck faults."""
    return _injected.get(((), []))


def num_ranks_added(faults: Iterable[Fault], num_ranks: int) -> int:
    """Return the number of spare ranks that the faults bring in."""
    added = sorted(fault.rank for fault in faults if fault.kind == "add")
    expected = list(range(num_ranks, num_ranks + len(added)))
    if added != expected:
        raise ConfigError(
            f"Fault: got 'add' for the ranks {added}, expected {expected}: in a world that begins "
            f"with {num_ranks} ranks each added one has a number of its own, from {num_ranks} up."
        )
    return len(added)


class FaultPlan:
    """The faults of one run, by rank and operation."""

    def __init__(
        self,
        faults: Iterable[Fault],
        num_ranks: int,
        *,
        is_elastic: bool = False,
        struck: list[Fault] | None = None,
    ) -> None:
        self.struck: list[Fault] = [] if struck is None else struck
        self._pending = list(faults)
        self._due: dict[Fault, int] = {}  # the operation, counted over the whole run
        for fault in self._pending:
            if (fault.kind in _ELASTIC_KINDS or fault.at_step is not None) and not is_elastic:
                raise ConfigError(
                    f"Fault: got kind={fault.kind!r}, at_step={fault.at_step}, expected "
                    f"'fail', 'delay' or 'drop' and no step: only in an elastic world do ranks "
                    "come and go and tell of their steps. Train with 'elastic_in_process'."
                )
            if fault.rank >= num_ranks:
                raise ConfigError(
                    f"Fault: got rank={fault.rank}, expected a rank below {num_ranks}."
                )
            if fault.at_step is None:
                self._due[fault] = fault.at_collective
        self._counts = [0] * num_ranks

    def begin_step(self, rank: int, step: int) -> list[int]:
        """Note that `rank` begins `step`; return the ranks that are added now."""
        added = []
        for fault in list(self._pending):
            if fault.at_step != step:
                continue
            if fault.kind == "add":
                added.append(fault.rank)
                self._strike(fault)
            elif fault.rank == rank:
                self._due[fault] = self._counts[rank] + fault.at_collective
        return added

    def next_fault(self, rank: int) -> Fault | None:
        """Count one more operation of `rank` and return the fault that strikes it, if any."""
        self._counts[rank] += 1
        for fault in self._pending:
            due = self._due.get(fault)
            if due is not None and fault.rank == rank and due <= self._counts[rank]:
                self._strike(fault)
                return fault
        return None

    def _strike(self, fault: Fault) -> None:
        self._pending.remove(fault)
        self.struck.append(fault)
