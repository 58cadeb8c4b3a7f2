"""Does training with less communication come to the same loss? Beside dense, from several seeds.

    python -m tests.benchmarks.convergence [--tasks gpt digits] [--only int8 ...]
        [--results FILE.jsonl] [--plot FILE.png]

The example GPT and the digits train on in-process ranks, with the same batches under every method.
A method's figure is the mean over the seeds of its last validation loss, over dense's. What a rank
sends is set beside what dense sends, over the whole run and over its second half, when all warm-ups
are over; `stale` is how many steps the oldest part of rank 0's parameters lay behind, on average.
With `--results` each run is kept as it ends, and one that is there is not repeated: remove the file
when a method changes.

Every method keeps to dense's hyperparameters. What PowerSGD and DiLoCo add was chosen on seeds 10
and 11, which are none of those that count here; but DiLoCo's warm-up was 250 steps until that had
missed its goal here.

`METHODS` has what each is and how far its loss may lie above dense's; `late` trains beside a slow
rank, so that the others are always ahead.
"""

import argparse
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L  # noqa: N812
import torch
from rich.console import Console
from rich.table import Table

from lightning_shard import AsyncSGDStrategy, DDPStrategy, LocalSGDStrategy, ZeRO3Strategy
from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.reporting.output import new_figure
from lightning_shard.data_parallel.compression import OneBit, PowerSGD, TopK
from tests.benchmarks.convergence_tasks import TASKS
from tests.data_parallel.async_sgd.programs import let_others_run
from tests.trainers import cpu_trainer

NUM_RANKS = 4
NUM_CURVE_POINTS = 10


@dataclass(frozen=True)
class Method:
    """One way to train.

    Attributes:
        bound: How far its loss may lie above dense's, as a share of that.
        delay: How far the others run before each step of the last rank; see `Late`.
    """

    strategy: Callable[..., Any]
    bound: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    delay: int = 0


def _outer(momentum: float) -> dict[str, Any]:
    """DiLoCo's outer optimizer for few rounds: 0.7 and 0.9 of its paper need a hundred."""
    options = {"lr": 1.0, "momentum": momentum, "nesterov": True}
    return {"class_path": "torch.optim.SGD", "init_args": options}


DILOCO = {"sync_every": 50, "outer_optimizer": _outer(momentum=0.7)}
ASYNC = {"staleness_bound": 4, "warmup_steps": 200}
METHODS = {
    "dense": Method(DDPStrategy),
    "fp16": Method(DDPStrategy, 0.01, {"compression": "fp16"}),
    "bf16": Method(DDPStrategy, 0.01, {"compression": "bf16"}),
    "int8": Method(DDPStrategy, 0.01, {"compression": "int8"}),
    "powersgd": Method(
        DDPStrategy,
        0.03,
        {"compression": PowerSGD(rank=6, warmup_steps=200, factor_dtype="bfloat16", adam=True)},
    ),
    "powersgd2": Method(DDPStrategy, 0.03, {"compression": PowerSGD(rank=2, warmup_steps=200)}),
    "topk": Method(
        DDPStrategy, 0.05, {"compression": TopK(ratio=0.01, warmup_steps=250, adam=True)}
    ),
    "onebit": Method(DDPStrategy, 0.05, {"compression": OneBit(warmup_steps=100)}),
    "onebit_paper": Method(
        DDPStrategy, None, {"compression": OneBit(warmup_steps=100, update_limit=None)}
    ),
    "wire": Method(ZeRO3Strategy, 0.01, {"quantized_gathers": "int8", "compression": "int4"}),
    "local": Method(LocalSGDStrategy, None, {"sync_every": 10, "warmup_steps": 50}),
    "diloco": Method(LocalSGDStrategy, 0.03, {**DILOCO, "warmup_steps": 300}),
    "diloco250": Method(LocalSGDStrategy, 0.03, {**DILOCO, "warmup_steps": 250}),
    "diloco25": Method(
        LocalSGDStrategy,
        0.03,
        {"sync_every": 25, "warmup_steps": 250, "outer_optimizer": _outer(momentum=0.5)},
    ),
    "async": Method(AsyncSGDStrategy, 0.05, ASYNC),
    "late": Method(AsyncSGDStrategy, 0.05, ASYNC, delay=400),
    "late100": Method(AsyncSGDStrategy, 0.05, {**ASYNC, "warmup_steps": 100}, delay=400),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training.

    Attributes:
        losses: Of the validations on the way, the last one at the end.
        sent_bytes: What a rank has sent until then.
        staleness: Of rank 0's parameters under asynchronous SGD, in steps, the mean over its own.
    """

    task: str
    name: str
    seed: int
    num_steps: int
    losses: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    staleness: float = 0.0

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What is to be done."""
        return self.task, self.name, self.seed, self.num_steps


class Late(L.Callback):
    """Makes the last rank slow: before each of its steps the others run, until they must wait."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == NUM_RANKS - 1:
            let_others_run(self._turns)


class Course(L.Callback):
    """Keeps every validation loss, and what this rank has sent by then."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.sent_bytes: list[int] = []
        self.staleness = 0.0

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.losses.append(trainer.callback_metrics["val_loss"].item())
        groups = Collectives.traffic_by_group()
        self.sent_bytes.append(sum(of.bytes for one in groups for of in one.traffic.values()))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(trainer.strategy, AsyncSGDStrategy):
            self.staleness = trainer.strategy.counters.mean_staleness


def train(run: Run) -> Run:
    """Train; return the run with what has come of it."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    L.seed_everything(run.seed)
    method, seen = METHODS[run.name], Course()
    model, data = TASKS[run.task]()
    trainer = cpu_trainer(
        devices=NUM_RANKS,
        strategy=method.strategy(backend="in_process", num_ranks=NUM_RANKS, **method.options),
        max_steps=run.num_steps,
        max_epochs=-1,
        callbacks=[seen, Late(method.delay)],
        check_val_every_n_epoch=None,
        val_check_interval=run.num_steps // NUM_CURVE_POINTS,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
    )
    trainer.fit(model, datamodule=data)
    return replace(run, losses=seen.losses, sent_bytes=seen.sent_bytes, staleness=seen.staleness)


def train_all(
    runs: Sequence[Run], results: Path | None = None, num_processes: int | None = None
) -> list[Run]:
    """Train what `results` does not have yet, several at a time; print each result as it comes."""
    known = kept(results)
    done = {run.key: known[run.key] for run in runs if run.key in known}
    todo = [run for run in runs if run.key not in done]
    with ProcessPoolExecutor(num_processes or os.cpu_count(), get_context("spawn")) as pool:
        for job in as_completed([pool.submit(train, run) for run in todo]):
            run = job.result()
            done[run.key] = run
            print(f"{run.task} {run.name} seed {run.seed}: {run.losses[-1]:.4f}", flush=True)
            if results is not None:
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(run)) + "\n")
    return [done[run.key] for run in runs]


def kept(results: Path | None) -> dict[tuple[str, str, int, int], Run]:
    """Read the runs that a file holds, by what they are."""
    if results is None or not results.exists():
        return {}
    lines = results.read_text(encoding="utf-8").splitlines()
    runs = (Run(**json.loads(line)) for line in lines)
    return {run.key: run for run in runs}


def last_loss(runs: Iterable[Run]) -> float:
    """Return the mean of the last losses."""
    return fmean(run.losses[-1] for run in runs)


def sent(runs: Iterable[Run], *, second_half: bool) -> float:
    """Return what a rank sends in a run, in bytes, the mean of all; of its second half only."""
    until = [(run.sent_bytes[len(run.sent_bytes) // 2 - 1], run.sent_bytes[-1]) for run in runs]
    return fmean(end - half * second_half for half, end in until)


def by_method(task: str, runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return a task's runs, those of a method together."""
    methods: dict[str, list[Run]] = {}
    for run in runs:
        if run.task == task:
            methods.setdefault(run.name, []).append(run)
    return methods


def render(task: str, runs: Sequence[Run]) -> Table:
    """Lay a task's last losses and bytes out beside dense's."""
    columns = ("method", "loss", "beyond dense", "goal", "bytes", "2nd half", "stale", "seeds")
    table = Table(*columns, title=task)
    methods = by_method(task, runs)
    dense = methods["dense"]
    for name, own in methods.items():
        bound = METHODS[name].bound
        shares = [
            sent(own, second_half=half) / sent(dense, second_half=half) for half in (False, True)
        ]
        table.add_row(
            name,
            f"{last_loss(own):.4f}",
            f"{last_loss(own) / last_loss(dense) - 1:+.1%}",
            "" if bound is None else f"<= {bound:.0%}",
            *(f"{share:.1%}" for share in shares),
            f"{fmean(run.staleness for run in own):.1f}",
            " ".join(f"{run.losses[-1]:.4f}" for run in own),
        )
    return table


def draw(path: Path, runs: Sequence[Run]) -> None:
    """Write a picture: a panel for each task, a line for each method, the mean of its seeds."""
    tasks = list(dict.fromkeys(run.task for run in runs))
    figure = new_figure(
        path, size=(6 * len(tasks), 4.5), otherwise="The command without --plot needs nothing."
    )
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for task, axes in zip(tasks, panels, strict=True):
        methods = by_method(task, runs)
        for number, (name, own) in enumerate(methods.items()):
            means = [fmean(losses) for losses in zip(*(run.losses for run in own), strict=True)]
            steps = [own[0].num_steps * (i + 1) // len(means) for i in range(len(means))]
            beyond = last_loss(own) / last_loss(methods["dense"]) - 1
            label = name if name == "dense" else f"{name} {beyond:+.1%}"
            # dense's line is wide and lies below, so that those upon it are seen
            style = {"color": "0.75", "linewidth": 5.0} if name == "dense" else {"linewidth": 1.2}
            axes.plot(steps, means, ("-", "--", ":")[number % 3], label=label, **style)
        axes.set(title=task, xlabel="step", ylabel="validation loss")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, print the tables, draw."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.convergence")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--processes", type=int, metavar="N")
    parser.add_argument("--results", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    options = parser.parse_args()
    names = list(dict.fromkeys(["dense", *options.only]))
    runs = train_all(
        [
            Run(task=task, name=name, seed=seed, num_steps=options.steps)
            for task in options.tasks
            for name in names
            for seed in range(options.seeds)
        ],
        options.results,
        options.processes,
    )
    for task in options.tasks:
        Console(width=110).print(render(task, runs))
    if options.plot is not None:
        draw(options.plot, runs)


if __name__ == "__main__":
    main()
