"""Contenders of one small model on two CPU ranks: they take turns, and a table compares them."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tests.benchmarks.timing import Ratio, Record, check_losses, turn_order

NUM_WARMUP_STEPS = 3
Draw = Callable[[torch.Generator], Sequence[Tensor]]
"""Draws the batch of a step, the same on every rank."""


class Contender(Protocol):
    """One way to train the model."""

    def step(self, *batch: Tensor) -> float:
        """Take one step and return the loss."""


def warmed_up(contender: Contender, draw: Draw) -> Record:
    """Return an empty record that knows the losses of a contender's first steps."""
    record = Record()
    _take_turn(contender, record, draw, NUM_WARMUP_STEPS)
    record.step_seconds.clear()
    record.cpu_seconds.clear()
    return record


def take_turns(
    contenders: Mapping[str, Contender],
    records: Mapping[str, Record],
    draw: Draw,
    num_rounds: int,
    num_steps: int,
) -> None:
    """Train the contenders in interleaved rounds; each rank calls."""
    for round_index in range(num_rounds):
        for name in turn_order(list(contenders), round_index):
            _take_turn(contenders[name], records[name], draw, num_steps)


def _take_turn(contender: Contender, record: Record, draw: Draw, num_steps: int) -> None:
    generator = torch.Generator().manual_seed(len(record.losses))
    batches = [draw(generator) for _ in range(num_steps)]
    dist.barrier()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    record.losses += [contender.step(*batch) for batch in batches]
    cpu_seconds = torch.tensor((time.process_time() - cpu_begin) / num_steps)
    dist.barrier()
    record.step_seconds.append((time.perf_counter() - begin) / num_steps)
    dist.all_reduce(cpu_seconds)
    record.cpu_seconds.append(cpu_seconds.item() / dist.get_world_size())


def average_losses(records: Mapping[str, Record]) -> None:
    """Let the losses be means over the ranks, which have samples or positions of their own."""
    for record in records.values():
        losses = torch.tensor(record.losses)
        dist.all_reduce(losses)
        record.losses = (losses / dist.get_world_size()).tolist()


def render(
    title: str,
    records: Mapping[str, Record],
    reference: str,
    goals: Mapping[str, tuple[str, float]],
) -> str:
    """Lay the medians and the ratios of ours to the others out as a table, and the noise.

    Args:
        title: Of the table.
        records: By contender; `ours` is one, and so is the reference once more, `..._again`.
        reference: Whose losses all must have.
        goals: By contender, which of ours is compared with it, and how large the ratio may be.
    """
    check_losses(records, reference)
    columns = ("contender", "median ms", "ours / it", "quartiles", "CPU ms", "ours / it")
    table = Table(*columns, "worst loss", "goal", title=title)
    for name, record in records.items():
        ours, goal = goals.get(name, ("ours", None))
        ratio = Ratio.of(records[ours], record)
        cpu, own_cpu = (median(one.cpu_seconds) * 1e3 for one in (record, records[ours]))
        pairs = zip(record.losses, records[reference].losses, strict=True)
        table.add_row(
            name,
            f"{median(record.step_seconds) * 1e3:.2f}",
            f"{ratio.median:.3f}",
            f"{ratio.low:.2f} - {ratio.high:.2f}",
            f"{cpu:.2f}",
            f"{own_cpu / cpu:.3f}",
            f"{max(abs(one / other - 1) for one, other in pairs):.1e}",
            "" if goal is None else f"{ours} <= {goal}",
        )
    noise = Ratio.of(records[f"{reference}_again"], records[reference])
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
        console.print(f"noise, {reference}_again / {reference}: {noise.median:.3f}")
    return capture.get()


def options_of(
    doc: str | None, sizes: Mapping[str, Any], default: Sequence[str], rounds: int, steps: int
) -> argparse.Namespace:
    """Read sizes, rounds and steps from the command line."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--sizes", nargs="+", choices=sizes, default=default)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--steps", type=int, default=steps)
    return parser.parse_args()
