"""`python -m tests.benchmarks`: step time, held and peak bytes of every scheme, side by side.

python -m tests.benchmarks                                 all of it, under five minutes
python -m tests.benchmarks --model layers                  200 small layers
python -m tests.benchmarks --only zero2 fsdp2 --no-memory  some contenders (and torch DDP)
python -m tests.benchmarks --profile zero2 ddp local       where zero2's step goes
python -m tests.benchmarks --against main                  has this checkout become slower?
python -m tests.benchmarks --device cuda --model wide      on all GPUs of this machine
python -m tests.benchmarks --ranks 4 --only zero2 zero2_shm
python -m tests.benchmarks --only zero2 zero2_shm zero2_mpi       # mpirun starts the ranks
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tests.benchmarks.against import (
    CONTROLS,
    OURS,
    REPOSITORY,
    Comparison,
    checkout,
    print_comparison,
    time_checkouts,
)
from tests.benchmarks.entries import CONTENDERS
from tests.benchmarks.memory import Footprint, measure_footprint, unavailable_reason
from tests.benchmarks.model import MODELS
from tests.benchmarks.overlap import hidden_shares
from tests.benchmarks.profiling import profile_contenders
from tests.benchmarks.ranks import DEVICES, NUM_RANKS, Ranks, ranks_on
from tests.benchmarks.report import (
    Results,
    make_console,
    print_overlap,
    print_profile,
    print_results,
    save_plot,
    write_json,
)
from tests.benchmarks.timing import REFERENCE, time_contenders
from tests.mpirun import MPIRUN


def main() -> None:
    """Run the benchmark that the command line asks for."""
    arguments = parse_arguments()
    console = make_console()
    sizes = (arguments.rounds, arguments.steps)
    if arguments.against is not None:
        sys.exit(compare(arguments, console))
    ranks = ranks_on(arguments.device, arguments.ranks)
    if any(CONTENDERS[name].needs_mpi for name in arguments.only or arguments.profile or ()):
        ranks = replace(ranks, under_mpi=has_mpirun())
    if arguments.profile:
        profile = ranks.run(profile_contenders, arguments.model, arguments.profile, *sizes)
        print_profile(console, profile)
        return
    results = run(ranks, arguments, console)
    print_results(console, results)
    if arguments.device == "cuda":
        shares = ranks.run(hidden_shares, arguments.model, list(results.records))
        print_overlap(console, shares)
    if arguments.json is not None:
        write_json(arguments.json, results)
    if arguments.plot is not None:
        save_plot(arguments.plot, results)


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
    add("--plot", type=Path, metavar="PATH", help="also draw the step times, with matplotlib")
    add("--device", choices=DEVICES, default="cpu", help="CPU ranks, or a rank on each GPU")
    add("--ranks", type=_positive, default=NUM_RANKS, help="CPU ranks")
    add("--against", metavar="REF", help="a commit or a folder: compare its package with this one")
    add("--profile", nargs="+", choices=names, metavar="NAME", help="no benchmark: profile these")
    return parser.parse_args()


def has_mpirun() -> bool:
    """Return True; end the program where there is no mpirun."""
    if not Path(MPIRUN).exists():
        sys.exit("Nothing was measured: there is no mpirun. Install lightning-shard[mpi].")
    return True


def run(ranks: Ranks, arguments: argparse.Namespace, console: Console) -> Results:
    """Time the contenders together, then weigh each one alone."""
    names = contender_names(arguments.only, ranks.device_type)
    load_before = os.getloadavg()[0]
    sizes = (arguments.rounds, arguments.steps)
    records = ranks.run(time_contenders, arguments.model, names, *sizes)
    load_after = os.getloadavg()[0]
    reason = "--no-memory was given" if arguments.no_memory else unavailable_reason(ranks)
    if reason is not None:
        console.print(f"Memory was not measured: {reason}.")
    return Results(
        ranks=str(ranks),
        settings={"model": arguments.model, "rounds": arguments.rounds, "steps": arguments.steps},
        load=(load_before, load_after),
        records=records,
        footprints={} if reason else weigh(ranks, arguments.model, names, console),
    )


def compare(arguments: argparse.Namespace, console: Console) -> int:
    """Time a commit's package and this one in one run; return 1 where this one is slower."""
    names = [name for name in CONTENDERS if name in {*CONTROLS, *(arguments.only or OURS)}]
    sizes = (arguments.rounds, arguments.steps)
    with checkout(arguments.against) as before:
        records = time_checkouts((before, REPOSITORY), arguments.model, names, *sizes)
    comparison = Comparison.of(*records)
    print_comparison(console, comparison, arguments.against)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(comparison.as_dict(), indent=2) + "\n")
    return int(bool(comparison.slower()))


def contender_names(only: Iterable[str] | None, device_type: str) -> list[str]:
    """Return the contenders to run, in the order of the table; torch DDP is always one."""
    fitting = {name: one for name, one in CONTENDERS.items() if device_type in one.devices}
    if only is None:
        return [name for name, entry in fitting.items() if entry.in_default_run]
    return [name for name in fitting if name in {REFERENCE, *only}]


def weigh(
    ranks: Ranks, model_name: str, names: Iterable[str], console: Console
) -> dict[str, Footprint]:
    """Measure the memory of each contender, one after the other."""
    footprints = {}
    for name in names:
        console.print(f"memory of {name}")
        footprints[name] = measure_footprint(ranks, model_name, name)
    return footprints


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


if __name__ == "__main__":
    main()
