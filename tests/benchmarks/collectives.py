"""`python -m tests.benchmarks.collectives`: our collectives over Gloo beside torch's own.

Two processes of one thread each, over loopback. The contenders of an operation take turns in every
round, so that noise hits both alike; a ratio is the median over the rounds. Beside the time stand
the bytes that crossed the loopback interface, both ranks together, over what a bandwidth-optimal
algorithm sends: W ranks times n(W-1)/W. Other programs' traffic adds to a turn's bytes but takes
nothing away, so the quietest round counts.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from lightning_shard.backends._c10d import all_gather_flat, reduce_scatter_flat
from lightning_shard.backends.exchange import ExchangeCollectives
from lightning_shard.backends.traffic import ring_share
from tests.benchmarks.ranks import NUM_RANKS, on_ranks
from tests.benchmarks.report import make_console

OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce")
OURS, TORCH = "ours", "torch"
INTERFACES = Path("/proc/net/dev")
_TRANSMITTED_BYTES = 8  # column of /proc/net/dev, after the name


@dataclass(kw_only=True)
class Turns:
    """What one contender did: seconds and loopback bytes of one call, one figure per round."""

    seconds: list[float] = field(default_factory=list)
    wire_bytes: list[float] = field(default_factory=list)


def main() -> None:
    """Run the benchmark that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.collectives")
    parser.add_argument("--megabytes", type=int, default=64, help="of the full fp32 tensor")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=4, help="of each contender in a round")
    sizes = vars(parser.parse_args())
    load_before = os.getloadavg()[0]
    records = on_ranks(time_collectives, **sizes)
    loads = f"load average {load_before:.1f} before and {os.getloadavg()[0]:.1f} after"
    print_records(make_console(), records, sizes["megabytes"] << 20, loads)


def time_collectives(
    rank: int, megabytes: int, rounds: int, calls: int
) -> dict[tuple[str, str], Turns]:
    """Time each operation of both in turns, on tensors of so many megabytes; each rank calls."""
    del rank
    assert dist.group.WORLD is not None
    contenders = make_contenders(ExchangeCollectives(dist.group.WORLD), megabytes << 20)
    records = {name: Turns() for name in contenders}
    for number in range(-1, rounds):  # the first is warm-up
        names = list(contenders)
        for name in names if number % 2 else reversed(names):
            seconds, wire_bytes = take_turn(contenders[name], calls)
            if number >= 0:
                records[name].seconds.append(seconds)
                records[name].wire_bytes.append(wire_bytes)
    return records


def make_contenders(
    ours: ExchangeCollectives, num_bytes: int
) -> dict[tuple[str, str], Callable[[], object]]:
    """Make every operation of both contenders, on the same buffers."""
    full = torch.randn(num_bytes // 4)
    local = torch.empty(full.numel() // ours.size)
    group = ours.group
    return {
        ("reduce_scatter", OURS): lambda: ours.reduce_scatter(local, full),
        ("reduce_scatter", TORCH): lambda: reduce_scatter_flat(local, full, group=group),
        ("all_gather", OURS): lambda: ours.all_gather(full, local),
        ("all_gather", TORCH): lambda: all_gather_flat(full, local, group=group),
        ("all_reduce", OURS): lambda: ours.all_reduce(full, "avg"),
        ("all_reduce", TORCH): lambda: dist.all_reduce(full, dist.ReduceOp.AVG, group=group),
    }


def take_turn(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Return the seconds and loopback bytes of one call, the mean of several between barriers."""
    dist.barrier()
    bytes_before, start = loopback_bytes(), time.perf_counter()
    for _ in range(calls):
        call()
    dist.barrier()
    seconds = time.perf_counter() - start
    return seconds / calls, (loopback_bytes() - bytes_before) / calls


def loopback_bytes() -> float:
    """Return the bytes sent over the loopback interface so far; nan where none can be read."""
    if INTERFACES.exists():
        for line in INTERFACES.read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == "lo":
                return float(counters.split()[_TRANSMITTED_BYTES])
    return float("nan")


def optimal_bytes(operation: str, num_bytes: int) -> int:
    """Return what all ranks together must send."""
    passes = 2 if operation == "all_reduce" else 1
    return NUM_RANKS * ring_share(passes * num_bytes, NUM_RANKS)


def print_records(
    console: Console, records: dict[tuple[str, str], Turns], num_bytes: int, loads: str
) -> None:
    """Print a line per operation."""
    table = Table(title=f"{num_bytes >> 20} MB of fp32 on {NUM_RANKS} Gloo ranks; {loads}")
    columns = ("operation", "ours ms", "torch ms", "torch / ours", "quartiles", "ours", "torch")
    for column in columns[:-2]:
        table.add_column(column, justify="left" if column == "operation" else "right")
    for column in columns[-2:]:
        table.add_column(f"{column}: bytes / theory", justify="right")
    for operation in OPERATIONS:
        ours, other = records[operation, OURS], records[operation, TORCH]
        ratios = [t / o for o, t in zip(ours.seconds, other.seconds, strict=True)]
        low, _, high = quantiles(ratios, n=4)
        table.add_row(
            operation,
            *(f"{1000 * median(turns.seconds):.1f}" for turns in (ours, other)),
            f"{median(ratios):.2f}",
            f"{low:.2f} to {high:.2f}",
            *(
                f"{min(turns.wire_bytes) / optimal_bytes(operation, num_bytes):.4f}"
                for turns in (ours, other)
            ),
        )
    console.print(table)


if __name__ == "__main__":
    main()
