"""One checksum of a training with `same_bits=True`, whichever ranks, scheme, backend and loop.

python -m tests.strategies.same_bits_table [--models cnn gpt llama] [--precisions 32-true ...]
    [--backends in_process gloo shm] [--schemes 'hybrid 3' ...] [--steps 50]

A step has 8 micro-batches, AdamW, clipping at 1 and a warm-up. Ranks of one process train without
a break; then, and over each backend of processes, every scheme trains the first half on some ranks
and goes on from what other ranks have saved in the middle. A checksum is of the losses of all
steps, weights, buffers and optimizer state; the status is 1 where a model has several.
"""

import argparse
import csv
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import product
from math import fsum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import lightning as L  # noqa: N812
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard import HybridParallelStrategy, PipelineParallelStrategy
from tests.fabric import loops
from tests.processes import run_processes
from tests.strategies.models import ExampleGPT, HuggingFaceLM, Trained, llama
from tests.strategies.parity import SMALL_BUCKET_MB, STRATEGIES
from tests.strategies.pipeline_parallel.test_same_bits import Staged
from tests.strategies.test_same_bits import BATCH, MICRO_BATCHES, checksum
from tests.trainers import SILENT

STEPS_OF_EPOCH = 10
NUM_BLOCKS = 4  # one for each stage of the longest pipeline


class Logs(Trained):
    """Logs the loss of each micro-batch."""

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class CNN(Logs, Staged):
    """Convolutions with batch norms, dropout and noise."""

    loss = Staged.loss


class GPT(Logs, ExampleGPT):
    """The example's."""

    loss = ExampleGPT.loss


class Llama(Logs, HuggingFaceLM):
    """Hugging Face's."""


MODELS: dict[str, Any] = {
    "cnn": CNN,
    "gpt": lambda: GPT(num_layers=NUM_BLOCKS),
    "llama": lambda: Llama(llama(NUM_BLOCKS).network),
}


class Cell(NamedTuple):
    """A way to train: `zero1`, `hybrid 3` or `pipeline 0` (of a stage of ZeRO), `fabric zero2`."""

    scheme: str
    num_ranks: int
    num_stages: int = 1

    @property
    def is_fabric(self) -> bool:
        """Whether a loop of Fabric's trains."""
        return self.scheme.startswith("fabric")


def cells() -> Iterator[Cell]:
    """Yield all schemes on one rank, then on two, four and eight."""
    for num_ranks in (1, 2, 4, 8):
        for stage in STRATEGIES:
            yield Cell(stage, num_ranks)
            yield Cell(f"fabric {stage}", num_ranks)
        if num_ranks > 2:
            yield from (Cell(f"hybrid {stage}", num_ranks) for stage in (1, 2, 3))
        if num_ranks < 8:
            yield Cell("pipeline", num_ranks, num_ranks)
        if num_ranks == 4:
            yield from (Cell(f"pipeline {stage}", 4, 2) for stage in range(4))


class Job(NamedTuple):
    """A training up to a step, from the file of another one's middle if there is one."""

    cell: Cell
    model: str
    precision: Any
    backend: str
    num_steps: int
    every: int  # steps, after which there is a file
    folder: Path
    resumed: Path | None = None

    def file(self, step: int) -> Path:
        """Return where a step is saved."""
        return self.folder / f"step={step}.ckpt"


def strategy_of(job: Job) -> tuple[Any, int]:
    """Return a Trainer's strategy, and the micro-batches of one batch."""
    num_stages, (kind, _, stage) = job.cell.num_stages, job.cell.scheme.partition(" ")
    given: dict[str, Any] = {"backend": job.backend, "bucket_mb": SMALL_BUCKET_MB}
    given |= {"same_bits": True, "announce": False}
    if kind in STRATEGIES:
        return STRATEGIES[kind](**given), 1
    if kind == "hybrid":
        given["data_parallel_size"] = (2, job.cell.num_ranks // 2)
        return HybridParallelStrategy(zero_stage=int(stage), **given), 1
    given["num_microbatches"] = MICRO_BATCHES * num_stages // job.cell.num_ranks
    if not stage:
        return PipelineParallelStrategy(**given), given["num_microbatches"]
    given |= {"pipeline_parallel_size": num_stages, "zero_stage": int(stage)}
    return HybridParallelStrategy(**given), given["num_microbatches"]


def fit(job: Job) -> list[Any]:
    """Train with a Trainer; return the losses of its steps, weights with buffers, and state."""
    strategy, in_batch = strategy_of(job)
    logger = CSVLogger(job.folder, name="", version=0)
    saves = {"every_n_train_steps": job.every, "save_top_k": -1}
    trainer = L.Trainer(
        **SILENT | {"logger": logger, "enable_checkpointing": True},
        accelerator="cpu",
        devices=job.cell.num_ranks,
        strategy=strategy,
        precision=job.precision,
        max_steps=job.num_steps,
        accumulate_grad_batches=MICRO_BATCHES
        * job.cell.num_stages
        // job.cell.num_ranks
        // in_batch,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        callbacks=[ModelCheckpoint(job.folder, filename="{step}", **saves)],
    )
    module, data = module_and_data(job.model)
    loader = DataLoader(data, batch_size=BATCH * in_batch, shuffle=True)
    trainer.fit(module, loader, ckpt_path=job.resumed)
    if not trainer.is_global_zero:
        return []
    rows = csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines())
    losses = [float(row["loss_step"]) for row in rows if row["loss_step"]]
    last = torch.load(job.file(job.num_steps), weights_only=False)
    return [losses, last["state_dict"], last["optimizer_states"][0]["state"]]


def loop(fabric: Fabric, job: Job) -> list[Any]:
    """Train in a loop of Fabric's; return the same."""
    own = MICRO_BATCHES // fabric.world_size
    module, data = module_and_data(job.model)
    made = module.configure_optimizers()
    model, optimizer = fabric.setup(module, made["optimizer"])
    model.mark_forward_method("loss")
    schedule = made["lr_scheduler"]["scheduler"]
    state = {"state_dict": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
    if job.resumed is not None:
        fabric.load(job.resumed, state)
        fabric.strategy.in_order.num_steps = state["step"]
    first, losses = own * state["step"], []
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=BATCH, shuffle=True))
    epochs = (batch for _ in range(job.num_steps) for batch in loader)
    for number, batch in zip(range(job.num_steps * own), epochs, strict=False):
        if number < first:
            continue
        loss = model.loss(batch)
        losses.append(loss.detach().float())
        fabric.backward(loss / own)
        if (number + 1) % own == 0:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            state["step"] += 1
            if state["step"] % job.every == 0:
                fabric.save(job.file(state["step"]), state)
    of_all: Any = fabric.all_gather(torch.stack(losses))
    steps = of_all.reshape(fabric.world_size, -1, own).unbind(1)
    means = [torch.tensor(fsum(one.flatten().tolist()) / MICRO_BATCHES).item() for one in steps]
    last = torch.load(job.file(job.num_steps), weights_only=False)
    return [means, last["state_dict"], last["optimizer"]["state"]]


def module_and_data(name: str) -> tuple[Any, Any]:
    """Return a model, the same each time, and the samples of an epoch."""
    torch.manual_seed(7)
    module = MODELS[name]()
    return module, module.data(MICRO_BATCHES * BATCH * STEPS_OF_EPOCH)


def run(jobs: Sequence[Job]) -> list[list[Any]]:
    """Train one job after the other, on ranks of this process or as one of them."""
    warnings.simplefilter("ignore")
    found: list[list[Any]] = []
    for job in jobs:
        L.seed_everything(7, verbose=False)
        kind, _, stage = job.cell.scheme.partition(" ")
        if kind == "fabric":
            own = MICRO_BATCHES // job.cell.num_ranks
            made = loops.strategy_of(stage, job.backend, same_bits=True, num_micro_batches=own)
            fabric = loops.fabric_of(made, job.cell.num_ranks, precision=job.precision)
            found.append(fabric.launch(loop, job))
        else:
            found.append(fit(job))
    return found


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keep this process on a core, as its ranks wait for each other's interpreter on two."""
    given = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(given)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, given)


class Table:
    """Trains one model in one format, and counts how many trainings have each checksum."""

    def __init__(self, model: str, precision: str, num_steps: int, folder: Path) -> None:
        self.found: Counter[str] = Counter()
        self._given = {"model": model, "precision": precision, "every": num_steps // 2}
        self._num_steps, self._folder = num_steps, folder
        self._middle: dict[tuple[bool, int], Path] = {}  # of Fabric or not, by ranks

    def add(self, cells: Sequence[Cell], backend: str) -> None:
        """Train in one go, each from its beginning."""
        for cell in cells:
            job = self._job(cell, backend)
            with on_one_core():
                [(losses, *state)] = run([job])
            self._tell(job, "at once", losses, state)
            self._middle[job.cell.is_fabric, job.cell.num_ranks] = job.file(job.every)

    def add_in_halves(self, cells: Sequence[Cell], *backends: str) -> None:
        """Train first halves, and second ones from files that other ranks have saved."""
        jobs = [self._job(cell, backend) for backend, cell in product(backends, cells)]
        firsts = [job._replace(num_steps=job.every) for job in jobs]
        seconds = [job._replace(folder=job.folder / "on", resumed=self._other(job)) for job in jobs]
        num_ranks = cells[0].num_ranks
        found = run_processes(run, num_ranks, timeout_seconds=3000, jobs=[*firsts, *seconds])[0]
        for job, (before, *_), (after, *state) in zip(
            jobs, found[: len(jobs)], found[len(jobs) :], strict=True
        ):
            self._tell(job, "resumed", [*before, *after], state)
            self._middle[job.cell.is_fabric, num_ranks] = job.file(job.every)

    def _job(self, cell: Cell, backend: str) -> Job:
        place = self._folder / f"{backend} {cell.num_ranks} {cell.scheme}"
        return Job(cell, backend=backend, num_steps=self._num_steps, folder=place, **self._given)

    def _other(self, job: Job) -> Path:
        """Return the newest file of the middle that other ranks have saved."""
        cell = job.cell
        same_kind = [
            (ranks, file) for (kind, ranks), file in self._middle.items() if kind == cell.is_fabric
        ]
        return [file for ranks, file in same_kind if ranks != cell.num_ranks][-1]

    def _tell(self, job: Job, way: str, losses: Sequence[float], state: Sequence[Any]) -> None:
        told = checksum([*losses], *state)
        self.found[told] += 1
        cell = f"{job.cell.scheme:16} N = {job.cell.num_ranks} {way}"
        print(f"{job.model:6} {job.precision:11} {job.backend:10} {cell} {told}", flush=True)


def main(arguments: argparse.Namespace) -> int:
    """Print a line for each cell, and the checksums of each model; return the status."""
    status = 0
    for model, precision in product(arguments.models, arguments.precisions):
        with TemporaryDirectory() as folder:
            table = Table(model, precision, arguments.steps, Path(folder))
            every = [one for one in cells() if one.scheme in (arguments.schemes or [one.scheme])]
            table.add(every, "in_process")
            for num_ranks in (2, 4, 8) if arguments.backends else ():
                of_these = [one for one in every if one.num_ranks == num_ranks]
                table.add_in_halves(of_these, *arguments.backends)
        print(f"{model:6} {precision:11} {dict(table.found)}", flush=True)
        status = max(status, len(table.found) - 1)
    return status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--precisions", nargs="+", default=["32-true", "bf16-mixed", "bf16-true"])
    parser.add_argument("--backends", nargs="*", default=["gloo", "shm"])
    parser.add_argument("--schemes", nargs="*", help="such as 'hybrid 3'; all by default")
    parser.add_argument("--steps", type=int, default=50)
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning_shard"):
        logging.getLogger(name).setLevel(logging.ERROR)
    importable = import_module("tests.strategies.same_bits_table")  # as processes are sent its jobs
    sys.exit(importable.main(parser.parse_args()))
