"""`python -m tests.benchmarks`: step time, held and peak bytes of every scheme, side by side.

python -m tests.benchmarks                                 all of it, under five minutes
python -m tests.benchmarks --model layers                  200 small layers
python -m tests.benchmarks --only zero2 fsdp2 --no-memory  some contenders (and torch DDP)
python -m tests.benchmarks --profile zero2 ddp local       where zero2's step goes
"""

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from tests.benchmarks.contenders import CONTENDERS
from tests.benchmarks.memory import Footprint, measure_footprint, unavailable_reason
from tests.benchmarks.model import MODELS
from tests.benchmarks.profiling import profile_contenders
from tests.benchmarks.ranks import on_ranks
from tests.benchmarks.report import Results, make_console, print_profile, print_results, write_json
from tests.benchmarks.timing import REFERENCE, time_contenders


def main() -> None:
    """Run the benchmark that the command line asks for."""
    arguments = parse_arguments()
    console = make_console()
    if arguments.profile:
        sizes = (arguments.rounds, arguments.steps)
        profile = on_ranks(profile_contenders, arguments.model, arguments.profile, *sizes)
        print_profile(console, profile)
        return
    results = run(arguments, console)
    print_results(console, results)
    if arguments.json is not None:
        write_json(arguments.json, results)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    names = list(CONTENDERS)
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description="Step time and memory of every scheme beside what it replaces.",
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="gpt")
    add("--rounds", type=_positive, default=12, help="turns of each contender")
    add("--steps", type=_positive, default=2, help="steps of a turn")
    add("--only", nargs="+", choices=names, metavar="NAME", help=f"some of {', '.join(names)}")
    add("--no-memory", action="store_true", help="time only")
    add("--json", type=Path, metavar="PATH", help="also write every figure here")
    add("--profile", nargs="+", choices=names, metavar="NAME", help="no benchmark: profile these")
    return parser.parse_args()


def run(arguments: argparse.Namespace, console: Console) -> Results:
    """Time the contenders together, then weigh each one alone."""
    names = contender_names(arguments.only)
    load_before = os.getloadavg()[0]
    records = on_ranks(time_contenders, arguments.model, names, arguments.rounds, arguments.steps)
    load_after = os.getloadavg()[0]
    reason = "--no-memory was given" if arguments.no_memory else unavailable_reason()
    if reason is not None:
        console.print(f"Memory was not measured: {reason}.")
    return Results(
        settings={"model": arguments.model, "rounds": arguments.rounds, "steps": arguments.steps},
        load=(load_before, load_after),
        records=records,
        footprints={} if reason else weigh(arguments.model, names, console),
    )


def contender_names(only: Iterable[str] | None) -> list[str]:
    """Return the contenders to run, in the order of the table; torch DDP is always one."""
    if only is None:
        return [name for name, entry in CONTENDERS.items() if entry.in_default_run]
    return [name for name in CONTENDERS if name in {REFERENCE, *only}]


def weigh(model_name: str, names: Iterable[str], console: Console) -> dict[str, Footprint]:
    """Measure the memory of each contender, one after the other."""
    footprints = {}
    for name in names:
        console.print(f"memory of {name}")
        footprints[name] = measure_footprint(model_name, name)
    return footprints


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


if __name__ == "__main__":
    main()
