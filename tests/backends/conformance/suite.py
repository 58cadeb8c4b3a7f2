"""The checks by name, and how a rank of a real process runs them all in one go.

    @check                         suite: {"name": function}
    def name(collectives): ...        │
                                      ├─ in_process: a world of its own for each check
                                      └─ processes:  run_all, one start for every check; each rank
                                                     leaves a file per check, as a barrier of files

A check is run by every rank of the group, with the rank's device as the default one, and asserts.
It may use the facade or `collectives.group`, the process group itself.
"""

import os
import pickle
import re
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_shard.backends.collectives import Collectives
from tests.patience import patient

Check = Callable[[Collectives], None]
Option = TypeVar("Option")
CHECKS: dict[str, Check] = {}

_PATIENCE_SECONDS = 40.0  # more than the groups' own time-out
_LOOK_AGAIN_SECONDS = 0.0005


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a check ended on one rank: nothing, or the error that it raised."""

    error: str = ""
    message: str = ""
    report: str = ""

    @classmethod
    def of(cls, error: BaseException) -> "Outcome":
        """Describe an error that is being handled."""
        report = "".join(traceback.format_exception(error))
        return cls(error=type(error).__name__, message=str(error), report=report)


@dataclass(frozen=True, kw_only=True)
class Limit:
    """An error that a backend is known to raise: its type's name, and what the message says."""

    error: str
    match: str

    def complaint(self, outcome: Outcome) -> str:
        """Say how the outcome differs from this error; nothing when it does not."""
        expected = f"expected {self.error} matching {self.match!r}, a known limit"
        if not outcome.error:
            return f"{expected}; nothing was raised: if the limit is mended, strike it from LIMITS"
        if outcome.error == self.error and re.search(self.match, outcome.message):
            return ""
        return f"{expected}; got\n{outcome.report}"


def check(function: Check) -> Check:
    """Add a check to the suite under its function's name."""
    assert function.__name__ not in CHECKS, function.__name__
    CHECKS[function.__name__] = function
    return function


def check_each(
    options: Iterable[Option],
) -> Callable[[Callable[[Collectives, Option], None]], None]:
    """Add one check per option, `name_of_option`; it is passed as the second argument."""

    def register(function: Callable[[Collectives, Option], None]) -> None:
        for option in options:

            def one(collectives: Collectives, option: Option = option) -> None:
                function(collectives, option)

            one.__name__ = f"{function.__name__}_{str(option).removeprefix('torch.')}"
            check(one)

    return register


def run_all(
    collectives: Collectives,
    device: torch.device,
    names: list[str],
    folder: str,
    patience_seconds: float = _PATIENCE_SECONDS,
) -> None:
    """Run checks on this rank of a group of processes and leave every outcome in `folder`.

    Ranks meet between the checks, by their files. A check that all ranks finish or in which all
    fail leaves them in step; after any other the ranks try to meet through the group, and end
    the run if they cannot.
    """
    for name in names:
        outcome = run_one(name, collectives, device)
        _leave(folder, name, collectives.rank, outcome)
        outcomes = _await_outcomes(folder, name, collectives.size, patience_seconds)
        failed = [one is None or bool(one.error) for one in outcomes]
        if None in outcomes or (any(failed) and not all(failed) and not _meet(collectives, name)):
            return


def run_one(name: str, collectives: Collectives, device: torch.device) -> Outcome:
    """Run one check on this rank."""
    try:
        with device:
            CHECKS[name](collectives)
    except Exception as error:
        return Outcome.of(error)
    return Outcome()


def read_outcome(folder: str, name: str, rank: int) -> Outcome | None:
    """Return what a rank left of a check, or None when there is nothing."""
    file = Path(folder, f"{name}.{rank}")
    return pickle.loads(file.read_bytes()) if file.exists() else None


def _leave(folder: str, name: str, rank: int, outcome: Outcome) -> None:
    unfinished = Path(folder, f"unfinished.{rank}")
    unfinished.write_bytes(pickle.dumps(outcome))
    os.replace(unfinished, Path(folder, f"{name}.{rank}"))


def _await_outcomes(
    folder: str, name: str, size: int, patience_seconds: float
) -> list[Outcome | None]:
    deadline = time.monotonic() + patient(patience_seconds)
    while time.monotonic() < deadline:
        outcomes = [read_outcome(folder, name, rank) for rank in range(size)]
        if None not in outcomes:
            break
        time.sleep(_LOOK_AGAIN_SECONDS)
    return outcomes


def _meet(collectives: Collectives, name: str) -> bool:
    """Say whether the group still works, with the ranks at the same operation."""
    try:
        gathered: list[str | None] = [None] * collectives.size
        dist.all_gather_object(gathered, name, group=collectives.group)
    except Exception:
        return False
    return gathered == [name] * collectives.size
