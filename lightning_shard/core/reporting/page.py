"""The report of a run: one HTML page that needs nothing else, with a section for each question.

A section without figures is left out, and named at the end. The page has no script, and its policy
forbids it to fetch anything.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import median

from lightning_shard.core.options import checked_options
from lightning_shard.core.reporting import drawings
from lightning_shard.core.reporting import figures_of_run as figures
from lightning_shard.core.reporting.drawings import (
    Point,
    colours,
    legend,
    paragraph,
    percent,
    rate,
    seconds_of,
    table,
    tiles,
)
from lightning_shard.core.reporting.figures_of_run import (
    KINDS,
    PERSISTENT,
    memory_of_ranks,
    planned,
)
from lightning_shard.core.reporting.output import format_bytes
from lightning_shard.core.reporting.plan_deviation import deviations, why_of_another_run
from lightning_shard.core.reporting.records import Record, RunRecords, read_run

_COMPUTATIONS = ("forward", "backward", "backward of inputs", "backward of weights")
STYLE = (files(__package__) / "page.css").read_text(encoding="utf-8") + "".join(
    f".line.s{n} {{ stroke: var(--s{n}); }} rect.s{n} {{ fill: var(--s{n}); }} "
    f"i.s{n} {{ background: var(--s{n}); }} circle.s{n} {{ fill: var(--s{n}); }}\n"
    for n in range(10)
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def title(run: RunRecords) -> str:
    """Return the name of the run: its strategy and its ranks."""
    fit = run.last("fit")
    if fit is None:
        return f"Run in {run.folder}"
    return f"{fit['strategy']} on {fit['world_size']} ranks"


def head(run: RunRecords) -> str:
    """Return what comes before the sections: which run it is, and the figures that matter most."""
    fit = run.last("fit") or {}
    mesh = ", ".join(f"{axis} {size}" for axis, size in fit.get("mesh", {}).items())
    begun = [one["time"] for one in run.of("fit")][:1]
    about = [
        f"{fit.get('backend', '')} on {fit.get('device', '')}",
        f"mesh {mesh}",
        f"precision {fit.get('precision', '')}",
        f"torch {fit.get('torch', '')}",
        *(f"begun {_clock(one)}" for one in begun),
    ]
    told = {f"{one.folder}: " if run.others else "": verdict(one) for one in (run, *run.others)}
    parts = [paragraph(f"{whose}{said}.", "verdict") for whose, said in told.items() if said]
    parts += [paragraph("; ".join(about), "faint"), _state(run), tiles(_most_important(run))]
    if run.num_unreadable:
        lines = f"{run.num_unreadable} lines could not be read, as when a rank is killed."
        parts.append(paragraph(lines, "faint"))
    return "".join(parts)


def verdict(run: RunRecords) -> str:
    """Say in a sentence where the time goes, who is waited for, and how memory and loss are."""
    parts, losses = figures.averages(figures.split_of_steps(run).values()), figures.curve(run)
    said = []
    if total := sum(parts.values()):
        waiting = sum(one for name, one in parts.items() if name.startswith("waiting"))
        said = [f"{parts['compute'] / total:.0%} compute", f"{waiting / total:.0%} waiting"]
        slow = [str(one.rank) for one in figures.stragglers(run)]
        ranks = f"rank{'s' * (len(slow) > 1)} {' and '.join(slow)}"
        said.append(f"the others wait for {ranks}" if slow else "no straggler")
    held = [(sum(map(one.of, PERSISTENT)), one.expected) for one in memory_of_ranks(run)]
    wanted = [(own, sum(map(dict(of).get, PERSISTENT, (0.0,) * 3))) for own, of in held if of]
    if apart := [abs(own / expected - 1) for own, expected in wanted if expected]:
        said.append(f"memory within {max(apart):.1%} of the dry run")
    if losses and (lost := [step for step in figures.steps_of(run) if step > losses[-1][0]]):
        said.append(f"loss is no number from step {lost[0]} on")
    elif len(losses) > 1:
        tenth = -(-len(losses) // 10)
        first, last = (median(y for _, y in some) for some in (losses[:tenth], losses[-tenth:]))
        verb = "falls" if last < first else "rises" if last > first else "stays"
        said.append(f"loss {verb} from {first:.4g} to {last:.4g}")
    return "; ".join(said)


def _state(run: RunRecords) -> str:
    """Say how the run ended, if it did."""
    fit = run.last("fit")
    begun = fit["time"] if fit else 0.0
    failures = [one for one in run.of("failure") if one["time"] >= begun]
    if failures:
        first = failures[0]
        return paragraph(
            f"Failed: rank {first['rank']} at step {first['step']}: {first['error']}", "bad"
        )
    if any(one["time"] >= begun for one in run.of("end")):
        return paragraph("Finished.")
    last = max(one["time"] for one in run.records)
    return paragraph(
        f"No end was written: the run goes on, or was killed. Last record {_clock(last)}."
    )


def _most_important(run: RunRecords) -> dict[str, str]:
    steps = figures.steps_of(run)
    found: dict[str, str] = {}
    if steps:
        found["steps"] = f"{max(steps):,}"
        seconds = [
            max(one["seconds"] for one in ranks) for ranks in figures.steady_steps(run).values()
        ]
        found["a step, median"] = seconds_of(median(seconds))
    for what in ("tokens", "samples"):
        if points := figures.per_second(run, what):
            found[f"{what} a second"] = rate(median(y for _, y in points))
            break
    arithmetic = figures.arithmetic(run)
    if arithmetic is not None and arithmetic.utilization:
        found["MFU"] = percent(median(y for _, y in arithmetic.utilization))
    if held := [sum(one.held.values()) for one in memory_of_ranks(run)]:
        found["fullest rank"] = format_bytes(max(held))
    return found


def loss(run: RunRecords) -> str:
    """Show the loss, the mean over the ranks, and those of validations."""
    return _curves(
        run, lambda one: {"training": figures.curve(one), **figures.validated(one)}, "Loss"
    )


def optimizer(run: RunRecords) -> str:
    """Show the learning rate, and the norm of the gradient before it was clipped."""

    def drawn(key: str, name: str) -> str:
        return _curves(run, lambda one: {name: figures.curve(one, key)}, name)

    return drawn("learning_rate", "Learning rate") + drawn("grad_norm", "Gradient norm")


def _curves(
    run: RunRecords,
    points_of: Callable[[RunRecords], Mapping[str, Sequence[Point]]],
    name: str,
    write: Callable[[float], str] = "{:.4g}".format,
) -> str:
    """Draw series over the steps, and those of the runs to compare with; empty without a point."""
    series = {
        f"{name}, {one.folder}" if run.others else name: points
        for one in (run, *run.others)
        for name, points in points_of(one).items()
        if points
    }
    drawn = drawings.lines(series, title=name, write=write) if series else ""
    return drawn and legend(colours(series)) + drawn


def step_times(run: RunRecords) -> str:
    """Show what steps consist of, as means over the ranks."""
    steps = figures.split_of_steps(run)
    if not steps:
        return ""
    parts = figures.averages(steps.values())
    classes = colours(parts)
    total = sum(parts.values()) or 1.0
    rows = [(name, seconds_of(one), percent(one / total)) for name, one in parts.items()]
    return (
        paragraph(_of_clock(run), "faint")
        + legend(classes)
        + drawings.columns(steps, classes, title="Parts of each step")
        + table(("part", "median", "share"), rows)
    )


def _of_clock(run: RunRecords) -> str:
    """Say what the parts mean in this run."""
    fit = run.last("fit") or {}
    told = (
        "Means over the ranks. Waiting is for data of peers along an axis; sending is the rest of "
        "the collectives; compute is forward and backward, and hooks."
    )
    if fit.get("in_process"):
        return f"{told} Ranks of one process take turns: while one waits, others compute."
    if fit.get("device") == "cuda":
        return f"{told} Times are the host's: waiting inside NCCL counts as compute."
    return told


def ranks(run: RunRecords) -> str:
    """Show each rank's time, and who keeps the others waiting."""
    times = figures.rank_times(run)
    if not times:
        return ""
    usual = median(one.own_seconds for one in times)
    classes = colours(dict.fromkeys(name for one in times for name in one.parts))
    said = [
        f"Rank {one.rank} has {one.own_seconds / usual:.2f} times the median of the ranks' own "
        f"work, and the others wait for it."
        for one in figures.stragglers(run)
    ] or [f"No rank has more than {figures.SLOW:g} times the median of the ranks' own work."]
    rows = [
        (
            f"rank {one.rank}",
            seconds_of(one.seconds),
            seconds_of(one.own_seconds),
            f"{one.own_seconds / usual:.2f}" if usual else "",
            str(one.times_slowest),
        )
        for one in times
    ]
    bars = [(f"rank {one.rank}", one.parts) for one in times]
    return (
        "".join(map(paragraph, said))
        + legend(classes)
        + drawings.bars(bars, classes, title="Median step of each rank", write=seconds_of)
        + table(("", "step", "own", "own / median", "times slowest"), rows)
    )


def throughput(run: RunRecords) -> str:
    """Show tokens and samples a second, and the use of the devices."""
    rates = {what: figures.per_second(run, what) for what in ("tokens", "samples")}
    found = {f"{what} a second": points for what, points in rates.items() if points}
    if not found:
        return ""
    what = next(what for what, points in rates.items() if points)
    name = f"{what} a second"
    drawn = _curves(run, lambda one: {name: figures.per_second(one, what)}, name, rate)
    rows = [(one, rate(median(y for _, y in some))) for one, some in found.items()]
    arithmetic = figures.arithmetic(run)
    if arithmetic is None:
        told = run.last("flops") or {}
        note = f"The arithmetic of a step is not known. {told.get('obstacle') or ''}"
    else:
        per_rank = median(y for _, y in arithmetic.flops_per_second)
        rows.append(("operations of the model a second and rank", rate(per_rank, "FLOP/s")))
        note = "No machine profile was named, so MFU is not known: StepMonitor(machine='h100')."
        if arithmetic.utilization:
            share = median(y for _, y in arithmetic.utilization)
            rows.append((f"MFU, of {rate(arithmetic.peak or 0.0, 'FLOP/s')}", percent(share)))
            note = f"The peak is that of the machine profile {arithmetic.machine}."
        note += (
            " Operations are those of forward and backward without recomputation "
            "(arXiv:2204.02311, appendix B)."
        )
    return drawn + table(("", "median"), rows) + paragraph(note, "faint")


def memory(run: RunRecords) -> str:
    """Show what each rank holds, beside what was expected."""
    counted = memory_of_ranks(run)
    if not counted:
        return ""
    bars: list[tuple[str, Mapping[str, float]]] = []
    for one in counted:
        bars.append((f"rank {one.rank}", one.held))
        if one.expected is not None:
            bars.append(("at most", one.expected))
    if (plan := planned(run)) is not None:
        bars.append(("plan, fullest", plan))
    present = {name for _, parts in bars for name in parts}
    classes = colours(name for name in KINDS if name in present)
    rows = [
        (
            f"rank {one.rank}",
            *(_beside(one.held.get(kind, 0.0), one.expected, kind) for kind in PERSISTENT),
            format_bytes(one.offloaded) if one.offloaded else "",
            "" if one.peak is None else format_bytes(one.peak),
        )
        for one in counted
    ]
    peak_of = (run.last("memory") or {}).get("peak_of")
    peaks = "peak of the process" if peak_of == "process" else "peak of the device"
    return (
        paragraph(
            "Bytes when the optimizer is about to step. Under each rank what the dry run says "
            "it holds at most, activations among it.",
            "faint",
        )
        + legend(classes)
        + drawings.bars(bars, classes, title="Memory of each rank by kind", write=format_bytes)
        + table(("", *PERSISTENT, "in host memory", peaks), rows)
    )


def _beside(held: float, expected: Mapping[str, float] | None, kind: str) -> str:
    """Write what is held, and by how much it differs from what was expected."""
    if expected is None or not expected.get(kind):
        return format_bytes(held)
    return f"{format_bytes(held)} ({held / expected[kind] - 1:+.1%})"


def traffic(run: RunRecords) -> str:
    """Show what is sent along each axis in a step, beside the dry run."""
    axes = figures.axis_figures(run)
    if not axes:
        return ""
    rows = [
        (
            one.axis,
            format_bytes(one.sent),
            "" if one.expected is None else format_bytes(one.expected),
            f"{one.sent / one.expected - 1:+.1%}" if one.expected else "",
            seconds_of(one.waited),
        )
        for one in axes
    ]
    operations = [
        (
            f"{one.axis}: {name}",
            f"{each.calls:.4g}",
            format_bytes(each.sent),
            seconds_of(each.waited),
        )
        for one in axes
        for name, each in one.operations.items()
    ]
    head = ("axis", "sent in a step", "dry run", "deviation", "waited in a step")
    why = figures.why_not_compared(run)
    return (
        paragraph(
            "Bytes of the rank that sends most, as a ring would send them; what the dry run "
            "does not count are flags, norms, buffers and logged values. " + why,
            "faint",
        )
        + table(head, rows)
        + table(("operation", "calls", "sent", "waited"), operations)
    )


def pipeline(run: RunRecords) -> str:
    """Show what the ranks of the pipeline did in a batch."""
    if not run.timeline:
        return ""
    present = {one.category for one in run.timeline}
    classes = colours(name for name in _COMPUTATIONS if name in present)
    return (
        paragraph(f"{run.timeline_name}: the last batch that was profiled.", "faint")
        + legend(classes)
        + drawings.timeline(run.timeline, classes, title="Timeline of the pipeline")
    )


def events(run: RunRecords) -> str:
    """Show when fits and generations began and ended."""
    rows = [(_clock(one["time"]), str(one["step"]), _told(one)) for one in _once(run)]
    return table(("time (UTC)", "step", "event"), rows, words=(2,))


def _once(run: RunRecords) -> list[Record]:
    """Return the events, of those that all ranks tell the first one's."""
    found: dict[tuple[object, ...], Record] = {}
    for one in run.records:
        if one["kind"] == "failure":
            found.setdefault(("failure", one["rank"], one["error"]), one)
        elif one["kind"] == "generation":
            found.setdefault(("generation", one["number"]), one)
        elif one["kind"] in ("fit", "end") and one["rank"] == 0:
            found.setdefault((one["kind"], one["step"], one.get("process")), one)
    return list(found.values())


def _told(event: Record) -> str:
    if event["kind"] == "fit":
        return f"a fit begins on {event['world_size']} ranks, {event['strategy']}"
    if event["kind"] == "generation":
        members = f"{len(event['members'])} ranks ({', '.join(event['members'])})"
        because = f": {event['reason']}" if event["reason"] else ""
        return f"generation {event['number']} of {members}{because}"
    if event["kind"] == "failure":
        return f"rank {event['rank']} failed: {event['error']}"
    return "the fit ends"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def plan(run: RunRecords) -> str:
    """Show what was planned beside what was measured, and by how much they differ."""
    rows = deviations(run)
    if not rows:
        return ""
    said = (
        "Memory is that of the fullest rank, traffic that of the rank that sends most in a step. "
        "Planned times are those at the profile's peaks."
    )
    besides = why_of_another_run(run)
    return (
        paragraph(said, "faint")
        + (paragraph(besides, "bad") if besides else "")
        + table(("", "planned", "measured", "deviation"), [one.cells for one in rows])
    )


SECTIONS: dict[str, tuple[str, Callable[[RunRecords], str]]] = {
    "loss": ("Loss", loss),
    "optimizer": ("Learning rate and gradient", optimizer),
    "steps": ("Where the time of a step goes", step_times),
    "ranks": ("Ranks and stragglers", ranks),
    "throughput": ("Throughput", throughput),
    "memory": ("Memory", memory),
    "traffic": ("Traffic", traffic),
    "pipeline": ("Pipeline", pipeline),
    "plan": ("Plan and run", plan),
    "events": ("Events", events),
}
"""By its id each section's heading, and what makes it."""


def page_of(run: RunRecords) -> str:
    """Return the page as text."""
    name_of_run = escape(title(run))
    made = {name: make(run) for name, (_, make) in SECTIONS.items()}
    parts = "\n".join(
        f'<section id="{name}"><h2>{escape(SECTIONS[name][0])}</h2>{content}</section>'
        for name, content in made.items()
        if content
    )
    empty = ", ".join(SECTIONS[name][0] for name, content in made.items() if not content)
    parts += (
        paragraph(f"No callback of this run has written of: {empty}.", "faint") if empty else ""
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{name_of_run}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{name_of_run}</h1>{head(run)}\n{parts}\n</body></html>\n"
    )


def write_report(
    run_folder: str | Path, output: str | Path | None = None, others: Sequence[str | Path] = ()
) -> Path:
    """Make the page of a run, which may still go on, and return its path.

    Args:
        run_folder: Folder that the run's callbacks write into.
        output: File of the page; None for `report.html` in the folder.
        others: Folders of other runs, whose curves and verdicts are laid over this one's.
    """
    run = read_run(run_folder)
    run.others = list(map(read_run, others))
    path = Path(run_folder) / "report.html" if output is None else Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page_of(run), encoding="utf-8")
    return path


class Report:
    """The page of a run, which a notebook shows as the value of a cell.

    Args:
        run_folder: Folder that the run's callbacks write into.
    """

    @checked_options
    def __init__(self, run_folder: str | Path) -> None:
        self.run_folder = run_folder

    def _repr_html_(self) -> str:
        page = escape(page_of(read_run(self.run_folder)))
        return f'<iframe srcdoc="{page}" width="100%" height="800" style="border:0"></iframe>'
