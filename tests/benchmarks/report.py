"""The benchmark's figures as tables for people and as JSON for machines."""

import json
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from lightning_shard.core.reporting.output import new_figure
from tests.benchmarks.entries import CONTENDERS
from tests.benchmarks.memory import Footprint
from tests.benchmarks.profiling import PHASES, Profile
from tests.benchmarks.timing import REFERENCE, Ratio, Record

FILE_WIDTH = 110  # columns of a table that goes to a file


@dataclass(frozen=True)
class Target:
    """A promise on speed: `name` takes at most `limit` times the step time of `other`."""

    name: str
    other: str
    limit: float


TARGETS = (
    Target("shard_ddp", "ddp", 1.05),
    Target("zero1", "ddp", 1.05),
    Target("zero2", "ddp", 1.05),
    Target("zero1", "zero_redundancy", 1.00),
    Target("zero2", "fsdp2", 0.85),
    Target("zero3", "fsdp2_reshard", 0.85),
)


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that one run measured.

    Attributes:
        load: The machine's one-minute load average before and after; the two ranks are 2 of it.
    """

    ranks: str
    settings: Mapping[str, object]
    load: tuple[float, float]
    records: Mapping[str, Record]
    footprints: Mapping[str, Footprint]


def make_console() -> Console:
    """Make a console that does not fold tables when the output is a file."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    return console


def print_results(console: Console, results: Results) -> None:
    """Print times, bytes and targets."""
    console.print(_time_table(results))
    console.print(
        f"Losses agree with torch DDP's. Load average {results.load[0]:.1f} before and "
        f"{results.load[1]:.1f} after (the benchmark itself makes 2)."
    )
    if results.footprints:
        console.print(_memory_table(results))
    targets = _target_table(results)
    if targets.row_count > 0:
        console.print(targets)


def print_profile(console: Console, profile: Profile) -> None:
    """Print the phases of every contender and the two profiles of the first."""
    for clock, by_name in (("ms", profile.wall_seconds), ("CPU ms", profile.cpu_seconds)):
        table = table_of(f"{clock} per phase, medians", (*PHASES, "total"))
        for name, seconds in by_name.items():
            table.add_row(name, *(f"{1e3 * seconds[phase]:.1f}" for phase in (*PHASES, "total")))
        console.print(table)
    console.out(profile.operators, highlight=False)
    console.out(profile.functions, highlight=False)


def print_overlap(console: Console, shares: Mapping[str, float]) -> None:
    """Print what share of its communication each contender hides behind what it computes."""
    table = table_of("Communication on rank 0's GPU beside which something is computed", ("share",))
    for name, share in shares.items():
        table.add_row(CONTENDERS[name].label, f"{share:.0%}")
    console.print(table)


def save_plot(path: Path, results: Results) -> None:
    """Draw each contender's step time over torch DDP's, with its quartiles."""
    names = list(results.records)[::-1]
    ddp = results.records[REFERENCE]
    ratios = [Ratio.of(results.records[name], ddp) for name in names]
    figure = new_figure(path, size=(7, 1 + 0.3 * len(names)), otherwise="--json has the figures.")
    axes = figure.add_subplot()
    middles = [ratio.median for ratio in ratios]
    below = [ratio.median - ratio.low for ratio in ratios]
    above = [ratio.high - ratio.median for ratio in ratios]
    labels = [CONTENDERS[name].label for name in names]
    axes.errorbar(middles, labels, xerr=(below, above), fmt="o", capsize=3)
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel("step time over torch DDP's, median and quartiles of the rounds")
    axes.set_title(f"{results.ranks}, model {results.settings['model']}")
    figure.savefig(path)


def write_json(path: Path, results: Results) -> None:
    """Write every figure, the single rounds included."""
    contenders = {
        name: {
            "label": CONTENDERS[name].label,
            "median_step_seconds": median(record.step_seconds),
            "median_cpu_seconds": median(record.cpu_seconds),
            "share_of_roofline": record.roofline_seconds / median(record.step_seconds),
            "ratio_to_ddp": asdict(Ratio.of(record, results.records[REFERENCE])),
            **asdict(record),
            **({"footprint": asdict(results.footprints[name])} if results.footprints else {}),
        }
        for name, record in results.records.items()
    }
    machine = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "load_before_and_after": results.load,
    }
    targets = [
        {
            **asdict(target),
            "ratio": ratio.median,
            "met": ratio.median <= target.limit,
            "cpu_ratio": _cpu_ratio(results, target),
        }
        for target, ratio in _measured_targets(results)
    ]
    content = {
        "ranks": results.ranks,
        "settings": dict(results.settings),
        "machine": machine,
        "contenders": contenders,
        "targets": targets,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def _time_table(results: Results) -> Table:
    settings = ", ".join(f"{key} {value}" for key, value in results.settings.items())
    table = table_of(
        f"Step time, {results.ranks}: {settings}",
        ("ms", "of DDP", "quartiles", "CPU ms", "of DDP", "of roofline"),
        "Medians over the rounds; a ratio is the median of the rounds' ratios.\nCPU: processor "
        "time per rank, all threads; it tells more than the clock on a busy machine.\nRoofline: "
        "the step's matrices at the rate of square ones, measured on all ranks at once.",
    )
    ddp = results.records[REFERENCE]
    for name, record in results.records.items():
        ratio = Ratio.of(record, ddp)
        cpu_seconds = median(record.cpu_seconds)
        table.add_row(
            CONTENDERS[name].label,
            f"{1e3 * median(record.step_seconds):.1f}",
            f"{ratio.median:.3f}",
            f"{ratio.low:.2f}-{ratio.high:.2f}",
            f"{1e3 * cpu_seconds:.1f}",
            f"{cpu_seconds / median(ddp.cpu_seconds):.3f}",
            f"{record.roofline_seconds / median(record.step_seconds):.0%}",
        )
    return table


def _memory_table(results: Results) -> Table:
    table = table_of(
        "MB of the rank that has most, each contender alone",
        ("parameters", "gradients", "state", "held", "of DDP", "peak", "of DDP", "host"),
        "Parameters, gradients and state by storage; held and peak as resident memory.\nHost: "
        "the peak of all ranks together, what they share counted once, sampled (PSS).",
    )
    ddp = results.footprints[REFERENCE]
    for name, own in results.footprints.items():
        table.add_row(
            CONTENDERS[name].label,
            f"{own.parameter_bytes / 1e6:.1f}",
            f"{own.gradient_bytes / 1e6:.1f}",
            f"{own.state_bytes / 1e6:.1f}",
            f"{own.held_bytes / 1e6:.1f}",
            f"{own.held_bytes / ddp.held_bytes:.2f}",
            f"{own.peak_bytes / 1e6:.1f}",
            f"{own.peak_bytes / ddp.peak_bytes:.2f}",
            f"{own.host_peak_bytes / 1e6:.1f}",
        )
    return table


def table_of(title: str, headings: Iterable[str], caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption)
    table.add_column("contender")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _measured_targets(results: Results) -> list[tuple[Target, Ratio]]:
    return [
        (target, Ratio.of(results.records[target.name], results.records[target.other]))
        for target in TARGETS
        if {target.name, target.other} <= results.records.keys()
    ]


def _cpu_ratio(results: Results, target: Target) -> float:
    own, other = (results.records[name].cpu_seconds for name in (target.name, target.other))
    return median(own) / median(other)


def _target_table(results: Results) -> Table:
    table = table_of(
        "Targets for step time", ("over", "ratio", "quartiles", "target", "", "CPU ratio")
    )
    for target, ratio in _measured_targets(results):
        met = ratio.median <= target.limit
        table.add_row(
            target.name,
            CONTENDERS[target.other].label,
            f"{ratio.median:.3f}",
            f"{ratio.low:.2f}-{ratio.high:.2f}",
            f"≤ {target.limit:.2f}",
            "[green]met[/]" if met else "[red]missed[/]",
            f"{_cpu_ratio(results, target):.3f}",
        )
    return table
