"""Timelines of the ranks' actions: idle shares, live activations, and pictures of them.

A timeline is measured (a profiler's events) or simulated (`simulation.replay`). As text, 1F1B on
two ranks with three microbatches, a dot for each slot of waiting:

    rank 0   F0F1....B0--F2B1--..B2--  25% idle
    rank 1   ..F0B0--F1B1--F2B2--....  25% idle
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from lightning_shard.core.reporting.output import new_figure
from lightning_shard.pipeline_parallel.schedules import Action, Kind

_LIVE_CHANGE = {"F": 1, "B": -1, "W": -1}
_COMPUTATIONS: tuple[Kind, ...] = ("F", "B", "I", "W")
_MOST_LABELS = 60  # in a row of a picture: more would not be legible


class _Appearance(NamedTuple):
    category: str
    colour: str  # of matplotlib
    chrome_colour: str  # a name that chrome://tracing knows


_APPEARANCES: dict[Kind, _Appearance] = {
    "F": _Appearance("forward", "#4c78a8", "thread_state_running"),
    "B": _Appearance("backward", "#54a24b", "good"),
    "I": _Appearance("backward of inputs", "#88d27a", "rail_response"),
    "W": _Appearance("backward of weights", "#f2a93b", "rail_animation"),
    "SEND_F": _Appearance("message", "#9d9da1", "grey"),
    "RECV_F": _Appearance("message", "#d3d3d6", "generic_work"),
    "SEND_B": _Appearance("message", "#9d9da1", "grey"),
    "RECV_B": _Appearance("message", "#d3d3d6", "generic_work"),
}


class Event(NamedTuple):
    """One action of a rank, and when it started and ended, in seconds or units of a simulation."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The events of each rank, in order of their starts; all ranks on one clock."""

    rows: tuple[tuple[Event, ...], ...]

    @classmethod
    def of_rows(cls, rows: Iterable[Iterable[Event]]) -> "Timeline":
        """Sort the events of each rank by their starts."""
        return cls(tuple(tuple(sorted(row, key=lambda event: event.start)) for row in rows))

    @cached_property
    def computations(self) -> tuple[tuple[Event, ...], ...]:
        """The events without messages; those of one rank do not overlap."""
        return tuple(tuple(event for event in row if event.action.computes) for row in self.rows)

    @property
    def durations(self) -> dict[Action, float]:
        """Duration of each computation."""
        return {action: end - start for row in self.computations for action, start, end in row}

    @property
    def start(self) -> float:
        """Time at which the first rank began to compute."""
        return min((row[0].start for row in self.computations if row), default=0.0)

    @property
    def duration(self) -> float:
        """Time from the first computation of any rank to the end of the last one."""
        return max((row[-1].end for row in self.computations if row), default=0.0) - self.start

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """For each rank the share of the duration in which it did not compute, 0 to 1."""
        duration = self.duration
        busy = (sum(event.end - event.start for event in row) for row in self.computations)
        return tuple(1 - seconds / duration if duration else 0.0 for seconds in busy)

    @property
    def idle_share(self) -> float:
        """The mean of the ranks' idle shares: the pipeline's bubble."""
        return sum(self.idle_shares) / len(self.rows)

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank the most microbatches of a stage held at once, from F to B or W."""
        return tuple(peak_activations(event.action for event in row) for row in self.rows)


def peak_activations(actions: Iterable[Action]) -> int:
    """Return the most forwards that await their B or W at once, as the actions of a rank run."""
    return max(accumulate(_LIVE_CHANGE.get(action.kind, 0) for action in actions), default=0)


def draw_text(timeline: Timeline, width: int = 100) -> str:
    """Draw the computations as one line of text per rank.

    Args:
        timeline: What each rank computes, and when.
        width: Number of characters of the longest line.
    """
    one_stage = all(
        len({event.action.stage for event in row}) <= 1 for row in timeline.computations
    )
    scale = width / timeline.duration if timeline.duration else 0.0
    lines = []
    for rank, (row, idle) in enumerate(
        zip(timeline.computations, timeline.idle_shares, strict=True)
    ):
        cells = ["."] * width
        for action, start, end in row:
            first, last = (round((time - timeline.start) * scale) for time in (start, end))
            label = f"{action.kind}{action.microbatch}" if one_stage else str(action)
            cells[first:last] = label[: last - first].ljust(last - first, "-")
        lines.append(f"rank {rank:<2}  {''.join(cells)}  {idle:.0%} idle")
    return "\n".join(lines)


def save_png(timeline: Timeline, path: str | Path, *, title: str = "") -> None:
    """Draw a row per rank, with its idle share, into a PNG file, which needs matplotlib."""
    size = (14, 1.2 + 0.45 * len(timeline.rows))
    otherwise = "draw_text and save_chrome_trace need nothing."
    figure = new_figure(path, size=size, otherwise=otherwise)
    axes = figure.add_subplot()
    for rank, row in enumerate(timeline.computations):
        _draw_bars(axes, timeline, rank, row)
    idle = (f"rank {rank}\n{share:.1%} idle" for rank, share in enumerate(timeline.idle_shares))
    axes.set_yticks(range(len(timeline.rows)), list(idle), fontsize=7)
    axes.invert_yaxis()
    axes.set(title=title, xlabel=f"seconds; idle in all {timeline.idle_share:.1%}")
    known = [_APPEARANCES[kind] for kind in _COMPUTATIONS]
    bars = [axes.broken_barh([], (0, 0), color=one.colour) for one in known]
    names = [one.category for one in known]
    axes.legend(bars, names, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    figure.savefig(path, format="png", dpi=150)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the events in the Trace Event Format: a process per rank, microseconds.

    Messages overlap the computations, so they lie in a row of their own under them.
    """
    events: list[dict[str, Any]] = []
    for rank, row in enumerate(timeline.rows):
        events.append(_named("process_name", f"rank {rank}", rank, 0))
        events += (_traced(rank, event, timeline.start) for event in row)
        for thread in sorted({not event.action.computes for event in row}):
            name = "messages" if thread else "computations"
            events.append(_named("thread_name", name, rank, int(thread)))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_chrome_trace(timeline: Timeline, path: str | Path) -> None:
    """Write `chrome_trace` as JSON, for chrome://tracing or https://ui.perfetto.dev."""
    Path(path).write_text(json.dumps(chrome_trace(timeline)))


def _draw_bars(axes: Any, timeline: Timeline, rank: int, row: tuple[Event, ...]) -> None:
    spans = [(event.start - timeline.start, event.end - event.start) for event in row]
    colours = [_APPEARANCES[event.action.kind].colour for event in row]
    axes.broken_barh(spans, (rank - 0.4, 0.8), color=colours, edgecolor="white", linewidth=0.3)
    if len(row) > _MOST_LABELS:
        return
    for event, (start, width) in zip(row, spans, strict=True):
        axes.text(start + width / 2, rank, str(event.action), ha="center", va="center", fontsize=5)


def _named(kind: str, name: str, rank: int, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}


def _traced(rank: int, event: Event, origin: float) -> dict[str, Any]:
    action, start, end = event
    appearance = _APPEARANCES[action.kind]
    return {
        "ph": "X",
        "name": str(action),
        "cat": appearance.category,
        "cname": appearance.chrome_colour,
        "pid": rank,
        "tid": int(not action.computes),
        "ts": (start - origin) * 1e6,
        "dur": (end - start) * 1e6,
        "args": {"stage": action.stage, "microbatch": action.microbatch},
    }
