"""Reads a run's folder: what its ranks have written so far, of a run that may still go on.

A line that is cut off, as the last one of a rank that was killed can be, is left out and counted.
What a later fit, or an elastic generation, has done again from an earlier step on counts once: the
records of the steps behind that one are forgotten.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_shard.errors import ConfigError

FOLDER = "monitor"
"""Folder of the ranks' files in a run's folder."""


def path_of(run_folder: str | Path, rank: int) -> Path:
    """Return the path of a rank's file."""
    return Path(run_folder) / FOLDER / f"rank_{rank:05}.jsonl"


class RankFile:
    """Appends records to a rank's file, which is made with the first one.

        {"kind": "fit", "time": 1790000000.1, "rank": 0, "step": 0, "world_size": 4, ...}

    A line is one `write` to a file that is open for appending, so that several callbacks of a rank,
    and an elastic rank's successor, can write to one file.
    """

    def __init__(self, run_folder: str | Path, rank: int) -> None:
        self.path = path_of(run_folder, rank)
        self.rank = rank
        self._descriptor: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open file out: a copy opens it anew."""
        return {**vars(self), "_descriptor": None}

    def append(self, kind: str, step: int, **figures: Any) -> None:
        """Write one record of a kind, such as "step", after so many optimizer steps.

        Numbers that are not finite become null, which JSON has.
        """
        head = {"kind": kind, "time": time.time(), "rank": self.rank, "step": step}
        line = json.dumps(finite({**head, **figures}), allow_nan=False) + "\n"
        os.write(self._opened(), line.encode())

    def close(self) -> None:
        """Close the file; a later record opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _opened(self) -> int:
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_APPEND | os.O_CREAT | os.O_WRONLY
            self._descriptor = os.open(self.path, flags, 0o644)
        return self._descriptor


def finite(value: Any) -> Any:
    """Return a value with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


Record = dict[str, Any]

PLAN = "plan.json"
"""A plan of the run, in its folder: see `planning.plan.Plan.to_dict`."""

_BEGINNINGS = ("fit", "generation")  # records from which on steps are taken anew
_TIMELINES = ("batch_*.json", "*/batch_*.json")


@dataclass(frozen=True, kw_only=True)
class TimelineEvent:
    """One action of a rank of the pipeline.

    Attributes:
        name: Name of the action, such as "0F1".
        category: Kind of the action, such as "forward".
        start: Seconds since the first computation.
    """

    rank: int
    name: str
    category: str
    start: float
    seconds: float


@dataclass(kw_only=True)
class RunRecords:
    """What is in a run's folder; `others` are runs to compare it with."""

    folder: Path
    records: list[Record]
    num_unreadable: int = 0
    timeline: list[TimelineEvent] = field(default_factory=list)
    timeline_name: str = ""
    plan: Record | None = None
    others: "list[RunRecords]" = field(default_factory=list)

    def of(self, kind: str) -> list[Record]:
        """Return the records of a kind."""
        return [one for one in self.records if one["kind"] == kind]

    def last(self, kind: str) -> Record | None:
        """Return the last record of a kind; None without one."""
        return next(reversed(self.of(kind)), None)


def read_run(folder: str | Path) -> RunRecords:
    """Read a run's folder, which has a file of a rank."""
    folder = Path(folder)
    files = sorted((folder / FOLDER).glob("rank_*.jsonl"))
    if not files:
        raise ConfigError(
            f"{folder} has no {FOLDER}/rank_*.jsonl, expected the folder of a run with "
            f"StepMonitor, TrafficMonitor or MemoryMonitor among its callbacks. Pass the folder "
            f"that they were given, or the logger's."
        )
    found: list[Record] = []
    num_unreadable = 0
    for path in files:
        read = list(_lines(path))
        own = [one for one in read if one is not None]
        num_unreadable += len(read) - len(own)
        found += _surviving(own)
    if not found:
        raise ConfigError(
            f"The files in {folder / FOLDER} have no record that can be read, expected JSON lines "
            f"of callbacks. Wait for the first step, or pass the folder of another run."
        )
    name, timeline = _last_timeline(folder)
    return RunRecords(
        folder=folder,
        records=_of_present_ranks(sorted(found, key=lambda one: one["time"])),
        num_unreadable=num_unreadable,
        timeline=timeline,
        timeline_name=name,
        plan=_plan(folder / PLAN),
    )


def _lines(path: Path) -> Iterator[Record | None]:
    """Read a file's records; None for a line that is none."""
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
            record["kind"], record["time"] + 0.0, record["rank"] + 0, record["step"] + 0
        except (ValueError, KeyError, TypeError):
            yield None
        else:
            yield record


def _surviving(records: Iterable[Record]) -> list[Record]:
    """Return one rank's records without those of steps that were taken again later."""
    kept: list[Record] = []
    for record in records:
        if record["kind"] in _BEGINNINGS:
            begins = record["step"]
            kept = [one for one in kept if one["step"] <= begins or one["kind"] in _BEGINNINGS]
        kept.append(record)
    return kept


def _of_present_ranks(records: list[Record]) -> list[Record]:
    """Leave out what ranks have done that then were lost, or that the last fit does not have."""
    fits = [one for one in records if one["kind"] == "fit" and one["rank"] == 0]
    is_elastic = any(one["kind"] == "generation" for one in records)
    if fits and not is_elastic:
        return [one for one in records if one["rank"] < fits[-1]["world_size"]]
    for begun in [one for one in records if one["kind"] == "generation"]:
        records = [
            one
            for one in records
            if one["time"] >= begun["time"]
            or one["step"] <= begun["step"]
            or one["kind"] in _BEGINNINGS
        ]
    return records


def _last_timeline(folder: Path) -> tuple[str, list[TimelineEvent]]:
    """Return the newest timeline that `PipelineTimeline` has written, and its file's name."""
    paths = [path for pattern in _TIMELINES for path in folder.glob(pattern)]
    for path in sorted(paths, key=lambda one: (one.stat().st_mtime, one.name), reverse=True):
        try:
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
            return path.name, [_event(one) for one in events if one["ph"] == "X"]
        except (ValueError, KeyError, TypeError):  # half written, or somebody else's
            continue
    return "", []


def _event(traced: Record) -> TimelineEvent:
    return TimelineEvent(
        rank=traced["pid"],
        name=traced["name"],
        category=traced["cat"],
        start=traced["ts"] / 1e6,
        seconds=traced["dur"] / 1e6,
    )


def _plan(path: Path) -> Record | None:
    """Read a plan."""
    if not path.is_file():
        return None
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{path} is no JSON ({error}), expected a plan as `plan --json` prints it. Write it "
            f"anew, or remove it."
        ) from error
    if not isinstance(plan, dict):
        raise ConfigError(
            f"{path} holds {type(plan).__name__}, expected a plan's JSON object. Write it anew, or "
            f"remove it."
        )
    return plan
