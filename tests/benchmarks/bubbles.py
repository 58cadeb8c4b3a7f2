"""`python -m tests.benchmarks.bubbles`: replayed idle shares of every schedule.

python -m tests.benchmarks.bubbles                      p = 2 ... 64 by m = 4 ... 512, some minutes
python -m tests.benchmarks.bubbles --most-actions 20000 the small tables only, in seconds
python -m tests.benchmarks.bubbles --plot bubbles.png   also a picture (needs matplotlib)

p is the number of ranks, m of microbatches; F, I and W take 1, B takes 2, messages nothing.
"""

import argparse
import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_shard.pipeline_parallel.schedules import (
    SCHEDULES,
    allowed_microbatches,
    default_stages_per_rank,
    make_schedule,
)
from lightning_shard.pipeline_parallel.simulation import replay, theoretical_idle_share
from tests.benchmarks.report import make_console

RANKS = (2, 4, 8, 16, 32, 64)
MICROBATCHES = (4, 8, 16, 32, 64, 128, 256, 512)
NOT_ALLOWED, TOO_LARGE = "-", "large"


@dataclass(frozen=True)
class Point:
    """The idle share of one schedule, replayed and by theory; exact: the two must be equal."""

    replayed: float
    theory: float
    exact: bool

    def __str__(self) -> str:
        relation = "=" if abs(self.replayed - self.theory) < 1e-9 else ">"
        return f"{self.replayed:.1%} {relation}{'' if self.exact else '*'}"


Points = dict[tuple[int, int], Point | str]


def main() -> None:
    """Print the tables, and draw the plot where one is asked for."""
    arguments = parse_arguments()
    console = make_console()
    results = {name: idle_shares(name, arguments.most_actions) for name in arguments.only}
    for name, points in results.items():
        print_table(console, name, points)
    console.print(
        f"Idle share of the step, replayed. =: as the closed form; *: that is a lower bound, >: "
        f"the replay is above it. {NOT_ALLOWED}: the schedule does not allow this number of "
        "microbatches."
    )
    left_out = sum(point == TOO_LARGE for points in results.values() for point in points.values())
    if left_out:
        console.print(
            f"{TOO_LARGE}: {left_out} tables of more than {arguments.most_actions} computations "
            "were not replayed; --most-actions sets the limit."
        )
    if arguments.plot is not None:
        save_plot(results, arguments.plot)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.bubbles",
        description="Replayed idle shares of every pipeline schedule.",
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=SCHEDULES, default=SCHEDULES, metavar="NAME")
    add("--most-actions", type=int, default=10**6, help="computations of the largest table")
    add("--plot", type=Path, metavar="FILE.png", help="also draw them (needs matplotlib)")
    return parser.parse_args()


def idle_shares(name: str, most_actions: int) -> Points:
    """Replay one schedule for every p and m that it allows."""
    return {(p, m): _point(name, p, m, most_actions) for p in RANKS for m in MICROBATCHES}


def _point(name: str, num_ranks: int, num_microbatches: int, most_actions: int) -> Point | str:
    if not allowed_microbatches(name, num_ranks, num_microbatches):
        return NOT_ALLOWED
    if 2 * num_ranks * num_microbatches * default_stages_per_rank(name) > most_actions:
        return TOO_LARGE
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    gc.disable()  # half of the time: a table is hundreds of thousands of tuples, none in a circle
    try:
        timeline = replay(make_schedule(name, **sizes))
    finally:
        gc.enable()
    return Point(timeline.idle_share, *theoretical_idle_share(name, **sizes))


def print_table(console: Console, name: str, points: Points) -> None:
    """Print one row per p, one column per m."""
    table = Table("p \\ m", *map(str, MICROBATCHES), title=name)
    for p in RANKS:
        table.add_row(str(p), *(str(points[p, m]) for m in MICROBATCHES))
    console.print(table)


def save_plot(results: Mapping[str, Points], path: Path) -> None:
    """Draw one panel per p: idle share over m, one line per schedule."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True, sharey=True).flat
    for p, axes in zip(RANKS, panels, strict=True):
        for name, points in results.items():
            axes.plot(*_curve(points, p), marker="o", markersize=3, label=name)
        axes.set_xscale("log", base=2)
        axes.set(title=f"p = {p}", xlabel="microbatches", ylabel="idle share", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, format="png", dpi=120)


def _curve(points: Points, num_ranks: int) -> tuple[Iterable[int], Iterable[float]]:
    found = {m: points[num_ranks, m] for m in MICROBATCHES}
    shares = {m: point.replayed for m, point in found.items() if isinstance(point, Point)}
    return list(shares), list(shares.values())


if __name__ == "__main__":
    main()
