"""A plan held to account: what it said of memory, traffic and time beside what a run has measured.

    plan.json          what a step was to hold, send and wait     ─┐
    monitor/rank_*     what the ranks have held, sent and waited  ─┴─>  a row of each figure

A figure that cannot be compared has a row all the same, which says why.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from lightning_shard.core.reporting import figures_of_run as figures
from lightning_shard.core.reporting.drawings import Write, percent, seconds_of
from lightning_shard.core.reporting.figures_of_run import (
    PERSISTENT,
    by_kind,
    chosen_of,
    memory_of_ranks,
)
from lightning_shard.core.reporting.output import format_bytes
from lightning_shard.core.reporting.records import Record, RunRecords

_WRITERS: dict[str, Write] = {"bytes": format_bytes, "seconds": seconds_of, "share": percent}


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """A figure of a plan beside the run's.

    Attributes:
        figure: Name of the figure, such as "peak" or "sent along dp".
        unit: Unit of both numbers: "bytes", "seconds", or "share", which lies in 0 to 1.
        measured: What the run has measured; None where that cannot be compared.
        obstacle: Why it cannot be compared; empty where it can.
    """

    figure: str
    unit: str
    planned: float
    measured: float | None = None
    obstacle: str = ""

    @property
    def deviation(self) -> float | None:
        """By how much the run differs: of shares the difference, else relative to the plan."""
        if self.measured is None:
            return None
        if self.unit == "share":
            return self.measured - self.planned
        if not self.planned:
            return None if self.measured else 0.0
        return self.measured / self.planned - 1

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The row as texts: figure, planned, measured, and the deviation or the obstacle."""
        write = _WRITERS[self.unit]
        if self.measured is None:
            return self.figure, write(self.planned), "", self.obstacle
        said, relative = "not planned", self.deviation
        if relative is not None and self.unit == "share":
            said = f"{100 * relative:+.1f} points"
        elif relative is not None:
            said = f"{relative:+.1%}"
        return self.figure, write(self.planned), write(self.measured), said

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON has it."""
        return {**vars(self), "deviation": self.deviation}


def deviations(run: RunRecords) -> list[Deviation]:
    """Compare a run with its plan; nothing without one."""
    chosen = chosen_of(run.plan)
    if chosen is None:
        return []
    return [*_of_memory(run, chosen), *_of_traffic(run, chosen), *_of_time(run, chosen)]


def why_of_another_run(run: RunRecords) -> str:
    """Say in what a run is not the one that was planned; empty where nothing is known of it."""
    fit, chosen, plan = run.last("fit"), chosen_of(run.plan), run.plan or {}
    if fit is None or chosen is None:
        return ""
    mesh = fit.get("mesh", {})
    pairs = [("strategy", chosen.get("strategy"), fit.get("strategy"))]
    pairs += [("ranks", plan.get("devices"), fit.get("world_size"))]
    pairs += [("precision", plan.get("precision"), fit.get("precision"))]
    pairs += [(axis, chosen.get(axis), mesh.get(axis, 1)) for axis in ("pp", "dp", "tp")]
    said = [f"{name} {real}, planned {meant}" for name, meant, real in pairs if meant != real]
    known = [one for one in said if not one.endswith("planned None")]
    return f"The run is not the planned one: {'; '.join(known)}." if known else ""


def _of_memory(run: RunRecords, chosen: Record) -> Iterator[Deviation]:
    """Yield rows of the rank that holds most, which is the one that a plan speaks of."""
    meant, counted = by_kind(chosen["memory"]), memory_of_ranks(run)
    fullest = max(counted, key=lambda one: sum(map(one.of, PERSISTENT)), default=None)
    for kind in PERSISTENT:
        yield Deviation(
            figure=kind,
            unit="bytes",
            planned=meant.get(kind, 0.0),
            measured=None if fullest is None else fullest.of(kind),
            obstacle="" if fullest is not None else "needs MemoryMonitor",
        )
    peaks = [one.peak for one in counted if one.peak is not None]
    of_device = (run.last("memory") or {}).get("peak_of") == "device"
    yield Deviation(
        figure="peak",
        unit="bytes",
        planned=float(chosen["memory"].get("peak") or 0),
        measured=max(peaks) if peaks and of_device else None,
        obstacle=_why_no_peak(bool(peaks), of_device),
    )


def _why_no_peak(is_known: bool, of_device: bool) -> str:
    if not is_known:
        return "needs MemoryMonitor"
    return "" if of_device else "a CPU's is that of the whole process, the interpreter with it"


def _of_traffic(run: RunRecords, chosen: Record) -> Iterator[Deviation]:
    sent = {one.axis: one.sent for one in figures.axis_figures(run)}
    obstacle = figures.unsent(run) if run.of("traffic") else "needs TrafficMonitor"
    for axis, planned in (chosen.get("sent_bytes") or {}).items():
        if planned or sent.get(axis):
            yield Deviation(
                figure=f"sent along {axis}",
                unit="bytes",
                planned=float(planned),
                measured=None if obstacle else sent.get(axis, 0.0),
                obstacle=obstacle,
            )


def _of_time(run: RunRecords, chosen: Record) -> Iterator[Deviation]:
    steps = figures.steady_steps(run)
    needed = "" if steps else "needs StepMonitor"
    if chosen.get("pp", 1) > 1:
        obstacle = needed or _why_no_idle_share(run)
        yield Deviation(
            figure="pipeline's idle share",
            unit="share",
            planned=float(chosen.get("idle_share") or 0),
            measured=None if obstacle else _idle_share(steps),
            obstacle=obstacle,
        )
    if chosen.get("seconds"):
        seconds = [max(one["seconds"] for one in ranks) for ranks in steps.values()]
        yield Deviation(
            figure="a step",
            unit="seconds",
            planned=float(chosen["seconds"]),
            measured=median(seconds) if seconds else None,
            obstacle=needed,
        )


def _why_no_idle_share(run: RunRecords) -> str:
    fit = run.last("fit") or {}
    if fit.get("in_process"):
        return "ranks of one process take turns"
    if fit.get("device") == "cuda":
        return "the host's clock does not see waiting inside NCCL"
    return ""


def _idle_share(steps: dict[int, list[Record]]) -> float:
    """Return the share of their steps in which ranks wait for peers of their pipeline."""
    return median(
        fmean(one["waiting"].get("pp", 0.0) / (one["seconds"] or 1.0) for one in ranks)
        for ranks in steps.values()
    )
