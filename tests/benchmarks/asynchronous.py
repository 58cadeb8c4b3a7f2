"""Asynchronous SGD with a slow rank: what the others lose up to the bound, and how stale they get.

python -m tests.benchmarks.asynchronous                     four Gloo ranks, the last 5 times slower
python -m tests.benchmarks.asynchronous --bound 2 --step 0.05

    up to the bound    from an agreement, the time of the other ranks' first `bound` steps
    sustained          steps per second from an agreement to the next, where all must wait for it

A step computes a little and sleeps for the rest, as a host does whose accelerator works; so ranks
do not take each other's cores.
"""

import argparse
import importlib
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.data_parallel.async_sgd.programs import Worker
from tests.groups import join
from tests.processes import run_processes

NAME = "tests.benchmarks.asynchronous"
WIDTH = 512


@dataclass(frozen=True, kw_only=True)
class Result:
    """One rank's, of one run.

    Attributes:
        rounds: Seconds of the first `bound` steps of each round.
    """

    rounds: list[float]
    sustained: float
    max_staleness: int
    gradients: int
    waits: int


class Pace:
    """A model, and how long a step of this rank takes."""

    def __init__(self, seconds: float) -> None:
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self._input = torch.randn(8, WIDTH)
        self._seconds = seconds

    def loss(self) -> Tensor:
        end = time.perf_counter() + self._seconds
        loss: Tensor = self.model(self._input).square().mean()
        time.sleep(max(0.0, end - time.perf_counter()))
        return loss


def train(*, bound: int, step: float, slowdown: float, rounds: int, steps: int) -> Result:
    """One rank's part; runs in a process of its own."""
    torch.set_num_threads(1)
    ranks = join(seconds=300)
    torch.manual_seed(0)
    pace = Pace(step * slowdown if ranks.rank == ranks.size - 1 else step)
    worker = Worker.build(pace.model, _sgd, bound=bound, backend="gloo")
    worker.step(pace.loss)  # allocates
    times = []
    for _ in range(rounds):
        worker.sgd.agree()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(bound):
            worker.step(pace.loss)
        times.append(time.perf_counter() - begin)
    worker.sgd.agree()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        worker.step(pace.loss)
    worker.sgd.finish()
    sustained = steps / (time.perf_counter() - begin)
    counters = worker.sgd.counters
    dist.destroy_process_group()
    return Result(
        rounds=times,
        sustained=sustained,
        max_staleness=counters.max_staleness,
        gradients=counters.gradients,
        waits=counters.waits,
    )


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3)


def main() -> None:
    """Run with and without the slow rank; print throughputs, their ratio and the staleness."""
    parser = argparse.ArgumentParser(prog=f"python -m {NAME}")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--bound", type=int, default=4)
    parser.add_argument("--slowdown", type=float, default=5.0, help="of the last rank")
    parser.add_argument("--step", type=float, default=0.02, help="seconds of the others' steps")
    parser.add_argument("--rounds", type=int, default=20, help="of steps up to the bound")
    parser.add_argument("--steps", type=int, default=250, help="of the sustained run")
    arguments = parser.parse_args()
    options = {name: getattr(arguments, name) for name in ("bound", "step", "rounds", "steps")}
    undelayed, delayed = (
        run_processes(
            importlib.import_module(NAME).train,  # not that of `__main__`
            arguments.ranks,
            timeout_seconds=600,
            slowdown=slowdown,
            **options,
        )[:-1]
        for slowdown in (1.0, arguments.slowdown)
    )
    for line in report(undelayed, delayed, arguments.bound):
        print(line, flush=True)


def report(undelayed: list[Result], delayed: list[Result], bound: int) -> list[str]:
    """Compare the ranks that are not slow themselves, without and with a slow one beside them."""
    alone, beside = (
        bound / median(seconds for one in results for seconds in one.rounds)
        for results in (undelayed, delayed)
    )
    sustained = [median(one.sustained for one in results) for results in (undelayed, delayed)]
    staleness = max(one.max_staleness for one in delayed)
    return [
        f"up to the bound of {bound}: {alone:.1f} steps/s undelayed, {beside:.1f} beside the slow "
        f"rank: {beside / alone:.2f} (goal: at least 0.90)",
        f"sustained: {sustained[0]:.1f} steps/s undelayed, {sustained[1]:.1f} beside the slow rank",
        f"largest staleness observed: {staleness} in {delayed[0].gradients} gradients applied to "
        f"each shard (goal: at most {bound}); a rank waited before {delayed[0].waits} of its steps",
    ]


if __name__ == "__main__":
    main()
