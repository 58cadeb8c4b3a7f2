"""The benchmark's figures as tables for people and as JSON for machines."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from .contenders import CONTENDERS
from .memory import Footprint
from .profiling import PHASES, Profile
from .timing import REFERENCE, Ratio, Record

MIN_WIDTH = 132  # of a table that goes to a file


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
        settings: The command line's.
        load: The machine's one-minute load average before and after; the two ranks are 2 of it.
        records: Times and losses by contender.
        footprints: Bytes by contender; empty when memory was not measured.
    """

    settings: Mapping[str, object]
    load: tuple[float, float]
    records: Mapping[str, Record]
    footprints: Mapping[str, Footprint]


def make_console() -> Console:
    """Make a console that does not fold tables when the output is a file."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=MIN_WIDTH)
    return console


def print_results(console: Console, results: Results) -> None:
    """Print the table of contenders, then the targets."""
    console.print(_contender_table(results))
    console.print(
        f"Losses agree with torch DDP's. Load average {results.load[0]:.1f} before and "
        f"{results.load[1]:.1f} after (the benchmark itself makes 2)."
    )
    targets = _target_table(results)
    if targets.row_count > 0:
        console.print(targets)


def print_profile(console: Console, profile: Profile) -> None:
    """Print the phases of every contender and the two profiles of the first."""
    table = Table(title="ms per phase, medians")
    table.add_column("contender")
    for phase in (*PHASES, "total"):
        table.add_column(phase, justify="right")
    for name, seconds in profile.phase_seconds.items():
        table.add_row(name, *(f"{1e3 * seconds[phase]:.1f}" for phase in (*PHASES, "total")))
    console.print(table)
    console.out(profile.operators, highlight=False)
    console.out(profile.functions, highlight=False)


def write_json(path: Path, results: Results) -> None:
    """Write every figure, the single rounds included."""
    contenders = {
        name: {
            "label": CONTENDERS[name].label,
            "median_step_seconds": median(record.step_seconds),
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
        {**asdict(target), "ratio": ratio.median, "met": ratio.median <= target.limit}
        for target, ratio in _measured_targets(results)
    ]
    content = {
        "settings": dict(results.settings),
        "machine": machine,
        "contenders": contenders,
        "targets": targets,
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def _contender_table(results: Results) -> Table:
    settings = ", ".join(f"{key} {value}" for key, value in results.settings.items())
    table = Table(title=f"Two Gloo ranks of one thread: {settings}", caption=_CAPTION)
    table.add_column("contender")
    for heading in ("ms/step", "of DDP", "quartiles"):
        table.add_column(heading, justify="right")
    if results.footprints:
        for heading in ("parameters", "gradients", "state", "held", "of DDP", "peak", "of DDP"):
            table.add_column(heading, justify="right")
    for name, record in results.records.items():
        ratio = Ratio.of(record, results.records[REFERENCE])
        table.add_row(
            CONTENDERS[name].label,
            f"{1e3 * median(record.step_seconds):.1f}",
            f"{ratio.median:.3f}",
            f"{ratio.low:.2f}-{ratio.high:.2f}",
            *_footprint_cells(results, name),
        )
    return table


_CAPTION = (
    "Medians over the rounds; a ratio is the median of the rounds' ratios. Memory in MB of the "
    "rank that has most: parameters, gradients and state by storage, held and peak as resident."
)


def _footprint_cells(results: Results, name: str) -> list[str]:
    if not results.footprints:
        return []
    own, ddp = results.footprints[name], results.footprints[REFERENCE]
    return [
        *(f"{count / 1e6:.1f}" for count in (own.parameter_bytes, own.gradient_bytes)),
        f"{own.state_bytes / 1e6:.1f}",
        f"{own.held_bytes / 1e6:.1f}",
        f"{own.held_bytes / ddp.held_bytes:.2f}",
        f"{own.peak_bytes / 1e6:.1f}",
        f"{own.peak_bytes / ddp.peak_bytes:.2f}",
    ]


def _measured_targets(results: Results) -> list[tuple[Target, Ratio]]:
    return [
        (target, Ratio.of(results.records[target.name], results.records[target.other]))
        for target in TARGETS
        if {target.name, target.other} <= results.records.keys()
    ]


def _target_table(results: Results) -> Table:
    table = Table(title="Targets for step time")
    for heading in ("ours", "over"):
        table.add_column(heading)
    for heading in ("ratio", "quartiles", "target", ""):
        table.add_column(heading, justify="right")
    for target, ratio in _measured_targets(results):
        met = ratio.median <= target.limit
        table.add_row(
            target.name,
            CONTENDERS[target.other].label,
            f"{ratio.median:.3f}",
            f"{ratio.low:.2f}-{ratio.high:.2f}",
            f"≤ {target.limit:.2f}",
            "[green]met[/]" if met else "[red]missed[/]",
        )
    return table
