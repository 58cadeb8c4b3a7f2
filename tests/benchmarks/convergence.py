"""Does training with less communication come to the same loss? Beside dense, from several seeds.

    python -m tests.benchmarks.convergence [--tasks gpt digits] [--only int8 ...] [--plot FILE.png]

The example GPT and the digits train on in-process ranks, with the same batches under every method.
A method's figure is the mean over the seeds of its last validation loss, over dense's.

| name     | what it is                                                               | goal |
|----------|--------------------------------------------------------------------------|------|
| dense    | `shard_ddp`                                                              |      |
| fp16 ... | its `compression`: fp16, bf16, int8                                      | 1 %  |
|          | powersgd                                                                 | 3 %  |
|          | topk, onebit                                                             | 5 %  |
| local    | averages of parameters every 10 steps, 50 synchronous steps first        |      |
| diloco   | 50 steps, then Nesterov on what has changed; 100 synchronous steps first | 3 %  |
| async    | parameter servers, a bound of 4 steps                                    | 5 %  |
"""

import argparse
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from rich.table import Table
from torch import Tensor

from examples.train_digits import DigitClassifier, Digits
from examples.train_gpt import GPT, Text
from lightning_shard import AsyncSGDStrategy, DDPStrategy, LocalSGDStrategy
from lightning_shard.data_parallel.compression import OneBit, PowerSGD, TopK
from lightning_shard.figures import new_figure

NUM_RANKS = 4
NUM_CURVE_POINTS = 10
Curve = tuple[float, ...]


@dataclass(frozen=True)
class Method:
    """One way to train.

    Attributes:
        strategy: Makes it from common options.
        bound: How far its loss may lie above dense's, as a share of that.
        options: Its own.
    """

    strategy: Callable[..., Any]
    bound: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


METHODS = {
    "dense": Method(DDPStrategy),
    "fp16": Method(DDPStrategy, 0.01, {"compression": "fp16"}),
    "bf16": Method(DDPStrategy, 0.01, {"compression": "bf16"}),
    "int8": Method(DDPStrategy, 0.01, {"compression": "int8"}),
    "powersgd": Method(DDPStrategy, 0.03, {"compression": PowerSGD(rank=4, warmup_steps=100)}),
    "topk": Method(
        DDPStrategy, 0.05, {"compression": TopK(ratio=0.01, warmup_steps=100, adam=True)}
    ),
    "onebit": Method(DDPStrategy, 0.05, {"compression": OneBit(warmup_steps=100)}),
    "local": Method(LocalSGDStrategy, None, {"sync_every": 10, "warmup_steps": 50}),
    "diloco": Method(
        LocalSGDStrategy,
        0.03,
        {"sync_every": 50, "warmup_steps": 100, "outer_optimizer": "nesterov"},
    ),
    "async": Method(AsyncSGDStrategy, 0.05, {"staleness_bound": 4}),
}


class DigitsWithLoss(DigitClassifier):
    """Logs the validation loss as well."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        images, labels = batch
        self.log("val_loss", F.cross_entropy(self(images), labels), sync_dist=True)


def _gpt() -> tuple[L.LightningModule, L.LightningDataModule]:
    return GPT(), Text(batch_size=4)


def _digits() -> tuple[L.LightningModule, L.LightningDataModule]:
    return DigitsWithLoss(), Digits(batch_size=8)


TASKS = {"gpt": _gpt, "digits": _digits}


class Validations(L.Callback):
    """Keeps every validation loss."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.losses.append(trainer.callback_metrics["val_loss"].item())


def train(task: str, name: str, seed: int, num_steps: int) -> Curve:
    """Train once; return the validation losses on the way, the last one at the end."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    L.seed_everything(seed)
    method, seen = METHODS[name], Validations()
    model, data = TASKS[task]()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=method.strategy(backend="in_process", num_ranks=NUM_RANKS, **method.options),
        max_steps=num_steps,
        max_epochs=-1,
        callbacks=[seen],
        check_val_every_n_epoch=None,
        val_check_interval=num_steps // NUM_CURVE_POINTS,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    return tuple(seen.losses)


def train_all(
    tasks: Sequence[str], names: Sequence[str], num_seeds: int, num_steps: int
) -> dict[tuple[str, str], list[Curve]]:
    """Train everything, so many runs at a time as there are cores; by task and method."""
    runs = [(task, name, seed) for task in tasks for name in names for seed in range(num_seeds)]
    curves: dict[tuple[str, str], list[Curve]] = {}
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        jobs = [pool.submit(train, *run, num_steps) for run in runs]
        for (task, name, _), job in zip(runs, jobs, strict=True):
            curves.setdefault((task, name), []).append(job.result())
    return curves


def last_loss(curves: Iterable[Curve]) -> float:
    """Return the mean of the last losses."""
    return fmean(curve[-1] for curve in curves)


def render(task: str, curves: Mapping[tuple[str, str], list[Curve]]) -> Table:
    """Lay the last losses out beside dense's."""
    table = Table("method", "loss", "beyond dense", "goal", "seeds", title=task)
    dense = last_loss(curves[task, "dense"])
    for (of_task, name), runs in curves.items():
        if of_task == task:
            bound = METHODS[name].bound
            table.add_row(
                name,
                f"{last_loss(runs):.4f}",
                f"{last_loss(runs) / dense - 1:+.1%}",
                "" if bound is None else f"<= {bound:.0%}",
                " ".join(f"{curve[-1]:.4f}" for curve in runs),
            )
    return table


def draw(path: Path, curves: Mapping[tuple[str, str], list[Curve]], num_steps: int) -> None:
    """Write a picture: a panel for each task, a line for each method, the mean of its seeds."""
    tasks = list(dict.fromkeys(task for task, _ in curves))
    figure = new_figure(
        path, size=(6 * len(tasks), 4.5), otherwise="The command without --plot needs nothing."
    )
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for task, axes in zip(tasks, panels, strict=True):
        for (of_task, name), runs in curves.items():
            if of_task == task:
                means = [fmean(losses) for losses in zip(*runs, strict=True)]
                steps = [num_steps * (i + 1) // len(means) for i in range(len(means))]
                axes.plot(steps, means, "k" if name == "dense" else "", label=name)
        axes.set(title=task, xlabel="step", ylabel="validation loss", yscale="log")
        axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, print the tables, draw."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.convergence")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    options = parser.parse_args()
    names = list(dict.fromkeys(["dense", *options.only]))
    curves = train_all(options.tasks, names, options.seeds, options.steps)
    for task in options.tasks:
        Console(width=100).print(render(task, curves))
    if options.plot is not None:
        draw(options.plot, curves, options.steps)


if __name__ == "__main__":
    main()
