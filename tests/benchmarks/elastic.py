"""What elastic training costs: the time to recover from a kill, beside a restart, and snapshots.

    python -m tests.benchmarks.elastic                        both, a few minutes on two cores
    python -m tests.benchmarks.elastic --only recovery --kills 3 --restarts 1

recovery    four Gloo ranks of one thread train the example GPT; one of them, any, is killed with
            SIGKILL. From there to the moment when all that are left have finished the next step.
            A newcomer, which has waited with its imports done, then makes them four again. Beside
            it the same job under torchrun, whose agent starts all anew.
snapshots   two jobs in turns of a few steps, so that noise hits all alike: plain zero2, and an
            elastic one that takes snapshots every step, every ten steps, or never.
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from tests.benchmarks.elastic_job import NEVER, PARTS
from tests.benchmarks.elastic_processes import Job, Options, Step
from tests.benchmarks.timing import Ratio, Record, turn_order

GOAL_SECONDS = 1.0
GOAL_RATIO = 1.03
EVERY = {"never": NEVER, "every 10": 10, "every 1": 1}
LEAST_STEPS = 5  # between a change and a kill


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """From a kill to the end of the next step.

    Attributes:
        seconds: Until the last of those left had finished it.
        steps_lost: Finished before the kill, and done again.
        parts: Seconds of each part, on the rank that was last.
    """

    rank: int
    seconds: float
    steps_lost: int
    parts: Mapping[str, float]
    step_seconds: float


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a contender took in its turns.

    Attributes:
        held_bytes: Parameters, gradients and optimizer state of the rank that has most.
        snapshot_bytes: Host memory for snapshots of the rank that has most.
    """

    record: Record
    held_bytes: int
    snapshot_bytes: int


def measure_kills(options: Options, num_kills: int, *, restarts: bool) -> list[Recovery]:
    """Kill any rank so many times; in place a newcomer is let in after each but the last."""
    chance = random.Random(0)
    recoveries: list[Recovery] = []
    if num_kills == 0:
        return recoveries
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        job = stack.enter_context(Job(options, Path(folder), num_restarts=num_kills * restarts))
        for number in range(num_kills):
            job.wait_for_ranks(options.num_ranks)
            adds = not restarts and number + 1 < num_kills
            newcomer = job.start_newcomer() if adds else None
            job.wait_for_steps(LEAST_STEPS + chance.randrange(options.snapshot_every))
            time.sleep(chance.random() * step_seconds(job.steps))
            recoveries.append(_kill(job, chance.randrange(options.num_ranks)))
            if newcomer is not None:
                job.let_in(newcomer)
    return recoveries


def _kill(job: Job, rank: int) -> Recovery:
    job.read()
    generation = job.newest_generation
    ordinary = step_seconds(job.steps)
    before = {one.pid: one for one in job.steps if one.generation == generation}
    (victim,) = [pid for pid, one in before.items() if one.rank == rank]
    begin = time.monotonic()
    job.kill(victim)
    first = job.wait_for_generation_after(generation)
    last = max(first, key=lambda one: one.time)
    done = max(one.step for one in job.steps if one.generation == generation)
    return Recovery(
        rank=rank,
        seconds=last.time - begin,
        steps_lost=done - (last.step - 1),
        parts=parts_of(last, begin),
        step_seconds=ordinary,
    )


def parts_of(step: Step, begin: float) -> dict[str, float]:
    """Split the time from `begin` to the end of a step at the marks; none without marks."""
    if "detection" not in step.marks:
        return {}
    ends = {**step.marks, "step": step.time}
    parts, last = {}, begin
    for part in PARTS:
        if part in ends:
            parts[part], last = ends[part] - last, ends[part]
    return parts


def step_seconds(steps: Sequence[Step]) -> float:
    """The median time between the ends of two steps of one process in one generation."""
    times: dict[tuple[int, int], list[float]] = {}
    for one in steps:
        times.setdefault((one.pid, one.generation), []).append(one.time)
    gaps = [b - a for ends in times.values() for a, b in pairwise(ends)]
    return median(gaps)


def measure_snapshots(options: Options, num_rounds: int) -> dict[str, Cost]:
    """Let plain zero2 and the elastic job take turns."""
    costs = {
        name: Cost(record=Record(), held_bytes=0, snapshot_bytes=0) for name in ("zero2", *EVERY)
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        jobs = {
            scheme: stack.enter_context(
                Job(options, Path(folder, scheme), scheme=scheme, takes_turns=True)
            )
            for scheme in ("zero2", "elastic")
        }
        for number in range(-1, num_rounds):  # the first one warms up
            for name in turn_order(list(costs), max(number, 0)):
                job = jobs["zero2" if name == "zero2" else "elastic"]
                turns = job.take_turn(EVERY.get(name, NEVER))
                if number < 0:
                    continue
                record = costs[name].record
                record.step_seconds.append(max(one.seconds for one in turns))
                record.cpu_seconds.append(sum(one.cpu_seconds for one in turns))
                costs[name] = Cost(
                    record=record,
                    held_bytes=max(one.held_bytes for one in turns),
                    snapshot_bytes=max(one.snapshot_bytes for one in turns),
                )
    return costs


def recovery_table(
    in_place: Sequence[Recovery], restarted: Sequence[Recovery], snapshot_every: int
) -> Table:
    """Lay out how long recoveries took, and what of it was what."""
    table = _table("From kill -9 to the end of the next step", "in place", "torchrun's restart")
    columns = (in_place, restarted)
    table.add_row("median of", *(str(len(ones)) for ones in columns))
    table.add_row("seconds", *(_seconds([one.seconds for one in ones]) for ones in columns))
    slowest = (f"{max(one.seconds for one in ones):.2f}" if ones else "-" for ones in columns)
    table.add_row("slowest", *slowest)
    table.add_row("an ordinary step", *(_seconds([one.step_seconds for one in o]) for o in columns))
    lost = (str(max(one.steps_lost for one in ones)) if ones else "-" for ones in columns)
    table.add_row("steps done again, at most", *lost)
    table.add_section()
    for part in PARTS:
        seconds = [one.parts[part] for one in in_place if part in one.parts]
        table.add_row(f"  {part}", _seconds(seconds, digits=3), "")
    table.add_section()
    if in_place:
        took = median(one.seconds for one in in_place)
        table.add_row(f"goal: at most {GOAL_SECONDS:g} s", _verdict(took <= GOAL_SECONDS), "")
        few = max(one.steps_lost for one in in_place) <= snapshot_every
        table.add_row(f"goal: at most {snapshot_every} steps done again", _verdict(few), "")
    return table


def _seconds(values: Sequence[float], digits: int = 2) -> str:
    return f"{median(values):.{digits}f}" if values else "-"


def snapshot_table(costs: Mapping[str, Cost]) -> Table:
    """Lay out what snapshots cost in time and memory."""
    columns = "ms / step", "of never", "quartiles", "CPU ms", "of never", "held MB", "snapshots MB"
    table = _table("Snapshots, beside plain zero2", *columns)
    never = costs["never"].record
    for name, cost in costs.items():
        ratio = Ratio.of(cost.record, never)
        cpu = median(cost.record.cpu_seconds)
        table.add_row(
            name,
            f"{1e3 * median(cost.record.step_seconds):.1f}",
            f"{ratio.median:.3f}",
            f"{ratio.low:.2f}-{ratio.high:.2f}",
            f"{1e3 * cpu:.1f}",
            f"{cpu / median(never.cpu_seconds):.3f}",
            f"{cost.held_bytes / 1e6:.1f}",
            f"{cost.snapshot_bytes / 1e6:.1f}",
        )
    table.add_section()
    for other in ("never", "zero2"):
        ratio = Ratio.of(costs["every 10"].record, costs[other].record)
        table.add_row(
            f"goal: every 10 ≤ {GOAL_RATIO:.2f} of {other}",
            "",
            f"{ratio.median:.3f}",
            f"{ratio.low:.2f}-{ratio.high:.2f}",
            _verdict(ratio.median <= GOAL_RATIO),
        )
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _verdict(is_met: bool) -> str:
    return "[green]met[/]" if is_met else "[red]missed[/]"


def main() -> None:
    """Measure what the command line names, and print it."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.elastic")
    parser.add_argument("--only", choices=["recovery", "snapshots"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=128, help="of the GPT")
    parser.add_argument("--batch-size", type=int, default=8, help="blocks per rank")
    parser.add_argument("--snapshot-every", type=int, default=10, help="in the recoveries")
    parser.add_argument("--kills", type=int, default=10, help="in place")
    parser.add_argument("--restarts", type=int, default=3, help="under torchrun")
    parser.add_argument("--rounds", type=int, default=5, help="of turns")
    arguments = parser.parse_args()
    options = Options(
        num_ranks=arguments.ranks,
        width=arguments.width,
        batch_size=arguments.batch_size,
        snapshot_every=arguments.snapshot_every,
    )
    console = Console(width=120)
    console.print(f"Load average {os.getloadavg()[0]:.1f}; {options}")
    if arguments.only != "snapshots":
        in_place = measure_kills(options, arguments.kills, restarts=False)
        restarted = measure_kills(options, arguments.restarts, restarts=True)
        console.print(recovery_table(in_place, restarted, options.snapshot_every))
    if arguments.only != "recovery":
        console.print(snapshot_table(measure_snapshots(options, arguments.rounds)))
    console.print(f"Load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
