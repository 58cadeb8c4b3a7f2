"""The figures of a run's report, computed from its records.

The first step of each fit and generation is left out wherever durations are summed up: in it ranks
agree on what they will send, and what was expected is found out.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from lightning_shard.core.reporting.records import Record, RunRecords

Point = tuple[float, float]

_DATA_AND_SEQUENCES = "dp and cp"

SLOW = 1.1
"""Times the median of the ranks' own work, from which on a rank keeps the others waiting."""

OWN_PARTS = ("compute", "optimizer", "loading", "sending")
"""Parts of a step in which a rank does not wait for its peers."""


def steps_of(run: RunRecords) -> dict[int, list[Record]]:
    """Return the records of all ranks by step, in order."""
    found: dict[int, list[Record]] = defaultdict(list)
    for one in run.of("step"):
        found[one["step"]].append(one)
    return dict(sorted(found.items()))


def first_steps(run: RunRecords) -> set[int]:
    """Return the steps with which fits and generations have begun."""
    begun = [one["step"] for kind in ("fit", "generation") for one in run.of(kind)]
    taken = sorted(steps_of(run))
    return {next((step for step in taken if step > begin), -1) for begin in begun}


def steady_steps(run: RunRecords) -> dict[int, list[Record]]:
    """Return the records by step, without first ones where there are others."""
    every, first = steps_of(run), first_steps(run)
    return {step: ranks for step, ranks in every.items() if step not in first} or every


def parts_of(record: Record) -> dict[str, float]:
    """Return the seconds of each part of a rank's step."""
    waiting = {f"waiting {axis}": seconds for axis, seconds in sorted(record["waiting"].items())}
    return {name: record[name] for name in OWN_PARTS} | waiting


def curve(run: RunRecords, name: str = "loss") -> list[Point]:
    """Return the mean of the ranks' losses, or of another entry, at each step."""
    return [
        (step, fmean(values))
        for step, ranks in steps_of(run).items()
        if (values := [one[name] for one in ranks if one.get(name) is not None])
    ]


def validated(run: RunRecords) -> dict[str, list[Point]]:
    """Return what was logged in validations and is named a loss, by its name."""
    found: dict[str, list[Point]] = defaultdict(list)
    for one in run.of("metrics"):
        for name, value in one["values"].items():
            if "val" in name and "loss" in name and value is not None:
                found[name].append((one["step"], value))
    return dict(found)


def split_of_steps(run: RunRecords) -> dict[int, dict[str, float]]:
    """Return each steady step's parts, each the mean over the ranks."""
    steps = steady_steps(run)
    return {step: averages(map(parts_of, ranks), fmean) for step, ranks in steps.items()}


def averages(
    rows: Iterable[Mapping[str, float]], average: Callable[..., float] = median
) -> dict[str, float]:
    """Return the median, or another average, of each entry; a missing one counts as 0."""
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: average(row.get(name, 0.0) for row in rows) for name in names}


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """A rank's steps, as medians of seconds.

    Attributes:
        own_seconds: Median seconds of a step without waiting for peers.
        times_slowest: Number of steps in which no rank had more of its own to do.
    """

    rank: int
    parts: Mapping[str, float]
    seconds: float
    own_seconds: float
    times_slowest: int


def own_seconds(record: Record) -> float:
    """Return the seconds of a step in which a rank did not wait for peers."""
    return float(sum(record[name] for name in OWN_PARTS))


def rank_times(run: RunRecords) -> list[RankTimes]:
    """Return what each rank's steady steps take, in order of rank."""
    by_rank: dict[int, list[Record]] = defaultdict(list)
    slowest: dict[int, int] = defaultdict(int)
    for ranks in steady_steps(run).values():
        for one in ranks:
            by_rank[one["rank"]].append(one)
        if len(ranks) > 1:
            slowest[max(ranks, key=own_seconds)["rank"]] += 1
    return [
        RankTimes(
            rank=rank,
            parts=averages(map(parts_of, records)),
            seconds=median(one["seconds"] for one in records),
            own_seconds=median(map(own_seconds, records)),
            times_slowest=slowest[rank],
        )
        for rank, records in sorted(by_rank.items())
    ]


def stragglers(run: RunRecords) -> list[RankTimes]:
    """Return the ranks that have clearly more of their own to do than the median one."""
    times = rank_times(run)
    usual = median(one.own_seconds for one in times) if times else 0.0
    return [one for one in times if usual and one.own_seconds > SLOW * usual]


def per_second(run: RunRecords, what: str) -> list[Point]:
    """Return the samples or tokens that all ranks together have trained on in a second, by step.

    Ranks of one model, which are given the same samples, count once; the slowest rank's seconds do.
    """
    found: list[Point] = []
    for step, ranks in steady_steps(run).items():
        numbers = {one["data_rank"]: one[what] for one in ranks}
        known = [number for number in numbers.values() if number is not None]
        seconds = max(one["seconds"] for one in ranks)
        if known and len(known) == ranks[0]["data_size"] and seconds:
            found.append((step, sum(known) / seconds))
    return found


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """How much arithmetic ranks do.

    Attributes:
        flops_per_second: Operations of the model a second and rank, by step.
        peak: Operations a second of a rank's device; None where no profile was named.
    """

    flops_per_second: list[Point]
    peak: float | None
    machine: str

    @property
    def utilization(self) -> list[Point]:
        """MFU by step, 0 to 1; empty without a peak."""
        if not self.peak:
            return []
        return [(step, rate / self.peak) for step, rate in self.flops_per_second]


def arithmetic(run: RunRecords) -> Arithmetic | None:
    """Return how much arithmetic ranks do; None where that is not known."""
    told, fit = run.last("flops"), run.last("fit")
    if told is None or fit is None or not told["per"]:
        return None
    ((what, each),) = told["per"].items()
    rates = [(step, rate * each / fit["world_size"]) for step, rate in per_second(run, what)]
    return Arithmetic(flops_per_second=rates, peak=told["peak"], machine=told["machine"] or "")


def expected_of(run: RunRecords, rank: int) -> Record | None:
    """Return the dry run's figures of the pipeline rank that a rank is; None without a dry run."""
    told = run.last("dry_run")
    if told is None or not told["ranks"]:
        return None
    places = {one["rank"]: one["coordinates"].get("pp", 0) for one in run.of("fit")}
    expected: list[Record] = told["ranks"]
    place = places.get(rank, 0)
    return expected[place] if place < len(expected) else None


class _Operation(NamedTuple):
    """Means of a step and rank: calls, bytes that are sent, and seconds of waiting."""

    calls: float
    sent: float
    waited: float


_NONE = _Operation(0.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class AxisFigures:
    """What ranks send along an axis, or along several, in a step, as means.

    Attributes:
        sent: Bytes of the rank that sends most.
        expected: The same by the dry run; None where it says nothing.
        waited: Seconds that a rank waits.
        operations: Calls, bytes and waited seconds of a rank, by operation.
    """

    axis: str
    sent: float
    expected: float | None
    waited: float
    operations: Mapping[str, _Operation]


def axis_figures(run: RunRecords) -> list[AxisFigures]:
    """Return what is sent along each axis, by the axis's name."""
    by_rank: dict[int, list[Record]] = defaultdict(list)
    for one in run.of("traffic"):
        by_rank[one["rank"]].append(one)
    ranks = [_steady(records) for _, records in sorted(by_rank.items())]
    axes = sorted({axis for records in ranks for one in records for axis in one["axes"]})
    rows: dict[str, list[str]] = defaultdict(list)
    for axis in axes:
        rows[_row(run, axis)].append(axis)
    return [_figures(run, name, axes, ranks) for name, axes in rows.items()]


def _row(run: RunRecords, axis: str) -> str:
    """Return the row of an axis: with parts of sequences, gradients travel over dp and cp."""
    sizes: dict[str, int] = (run.last("fit") or {}).get("mesh", {})
    along_both = sizes.get("cp", 1) > 1 and set(axis.split("+")) <= {"dp", "cp"}
    return _DATA_AND_SEQUENCES if along_both else axis


def _steady(records: list[Record]) -> list[Record]:
    """Return a rank's records without that of the first step, where there are others."""
    return records[1:] or records


def _figures(
    run: RunRecords, name: str, axes: Sequence[str], ranks: Sequence[list[Record]]
) -> AxisFigures:
    means = [_mean_operations(axes, records) for records in ranks]
    operations = {
        one: _Operation(*map(fmean, zip(*(mean.get(one, _NONE) for mean in means), strict=True)))
        for one in sorted({one for mean in means for one in mean})
    }
    return AxisFigures(
        axis=name,
        sent=max(sum(one.sent for one in mean.values()) for mean in means),
        expected=_expected_sent(run, name),
        waited=sum(one.waited for one in operations.values()),
        operations=operations,
    )


def _mean_operations(axes: Sequence[str], records: Sequence[Record]) -> dict[str, _Operation]:
    """Return what a rank does along some axes in a step, by operation."""
    steps = sum(one["steps"] for one in records)
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for counted in (one["axes"].get(axis, {}) for one in records for axis in axes):
        for name, entries in counted.items():
            for place, entry in enumerate(("calls", "bytes", "waited")):
                total[name][place] += entries[entry] / steps
    return {name: _Operation(*sums) for name, sums in total.items()}


def why_not_compared(run: RunRecords) -> str:
    """Return why traffic cannot be compared with a dry run; empty where it can."""
    told, fit = run.last("dry_run"), run.last("fit")
    if told is None:
        return "No dry run was taken: it is TrafficMonitor's."
    if not told["ranks"]:
        return f"The dry run was not possible: {told['obstacle']}"
    if not told["every_step"]:
        return "Ranks of this strategy do not meet at every step, so a step's traffic differs."
    if fit is not None and fit["accumulate"] > 1:
        return "Gradients of several batches add up, of which a dry run takes one."
    return unsent(run)


def unsent(run: RunRecords) -> str:
    """Return which transfers this run's transport makes without sending; empty where it sends all.

    A shard in shared memory is read where it lies, so that gathering it sends no bytes.
    """
    backend = (run.last("fit") or {}).get("backend")
    operations = {
        name for one in run.of("traffic") for axis in one["axes"].values() for name in axis
    }
    if backend != "shm" or "all_gather" not in operations:
        return ""
    return (
        "Over shared memory gathers send nothing, since ranks read shards where they lie; plans "
        "and dry runs count them as a ring sends them."
    )


def _expected_sent(run: RunRecords, axis: str) -> float | None:
    told = run.last("dry_run")
    if told is None or why_not_compared(run):
        return None
    axes = ("dp", "cp") if axis == _DATA_AND_SEQUENCES else (axis,)
    known = [[one["sent"][name] for name in axes if name in one["sent"]] for one in told["ranks"]]
    return max(map(sum, known)) if known and all(known) else None


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
class CountedMemory:
    """One rank's memory, in bytes.

    Attributes:
        held: By kind, when the optimizer stepped last.
        expected: By kind, what a dry run says, at most at one time; None without one.
        offloaded: What lies in host memory besides.
        peak: The most so far, of the device or of the process; None where unknown.
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


def memory_of_ranks(run: RunRecords) -> list[CountedMemory]:
    """Return each rank's memory, as it was counted last."""
    found = []
    last = {one["rank"]: one for one in run.of("memory")}
    for rank, one in sorted(last.items()):
        expected = expected_of(run, rank)
        found.append(
            CountedMemory(
                rank=rank,
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
