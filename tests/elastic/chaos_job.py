"""An elastic job on real processes that writes down what it does, for the tests that disturb it.

    folder/gate            the step that ranks must not begin yet: the driver says how far they go
    folder/<pid>.journal   one line per microbatch, also those of a rank that is killed later
    folder/<pid>.log       what the process says; SIGUSR1 has it say where each of its threads is

Run as `python -m tests.elastic.chaos_job <the job as JSON>`, or forked from a process that has
imported this module, which saves a newcomer the seconds that the import takes.
"""

import faulthandler
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import ElasticStrategy
from tests.elastic.runs import Attempt, Classifier, Journal
from tests.trainers import cpu_trainer

NUM_SAMPLES = 198  # no multiple of a step's samples, so that an epoch's last step is smaller
BATCH_SIZE = 4
_CHECK_SECONDS = 0.01
_STEP_SECONDS = 0.03


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and where it is written down.

    Attributes:
        folder: Of the gate, journals, logs and checkpoints.
        saves_every: Steps between checkpoints; 0 for none.
    """

    folder: str
    num_ranks: int
    max_epochs: int
    scheme: Literal["shard_ddp", "zero1", "zero2", "zero3"] = "zero2"
    snapshot_every: int = 3
    timeout: float = 5.0
    saves_every: int = 0

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole training."""
        return -(-NUM_SAMPLES // (BATCH_SIZE * self.num_ranks)) * self.max_epochs

    def to_json(self) -> str:
        """As an argument of a command."""
        return json.dumps(asdict(self))


class Module(Classifier):
    """Labels are noisy and steps are small, so that no rounding grows over a long training."""

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def noisy_samples() -> TensorDataset:
    """Points in a plane's quadrants with their numbers; every fifth label is a random one."""
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 8, generator=chance)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    y[::5] = torch.randint(0, 4, (len(y[::5]),), generator=chance)
    return TensorDataset(x, y, torch.arange(NUM_SAMPLES))


class _Lines(list[Attempt]):
    """Attempts that are on disk, even if the process is killed the next moment."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        path = Path(folder, f"{os.getpid()}.journal")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, kind: str, **entries: Any) -> None:
        os.write(self._file, (json.dumps({"kind": kind, **entries}) + "\n").encode())

    def append(self, one: Attempt) -> None:
        self.write("attempt", **vars(one))


class _Watch(Callback):
    """Keeps to the gate, and writes down what this process holds of the system."""

    def __init__(self, job: Job, lines: _Lines) -> None:
        self._gate = Path(job.folder, "gate")
        self._lines = lines

    def on_fit_start(self, trainer: "L.Trainer", pl_module: "L.LightningModule") -> None:
        self._lines.write("up")

    def on_train_batch_start(self, trainer: "L.Trainer", *_: Any) -> None:
        strategy: Any = trainer.strategy
        status = Path("/proc/self/status").read_text()
        self._lines.write(
            "step",
            generation=strategy.generation.number,
            size=strategy.generation.size,
            rank=trainer.global_rank,
            step=trainer.global_step,
            num_files=len(os.listdir("/proc/self/fd")),
            num_threads=len(os.listdir("/proc/self/task")),
            rss_kb=int(status.split("VmRSS:")[1].split()[0]),
        )
        while int(self._gate.read_text()) <= trainer.global_step:
            time.sleep(_CHECK_SECONDS)
        time.sleep(_STEP_SECONDS)


def train(
    job: Job, journal: Journal, callbacks: list[Callback], **strategy_options: Any
) -> L.Trainer:
    """Fit; the same on all ranks."""
    L.seed_everything(1, verbose=False)
    torch.set_num_threads(1)
    strategy = ElasticStrategy(
        scheme=job.scheme, snapshot_every=job.snapshot_every, **strategy_options
    )
    if job.saves_every:
        folder = Path(job.folder, "checkpoints")
        saver = ModelCheckpoint(folder, every_n_train_steps=job.saves_every, save_top_k=-1)
        callbacks = [*callbacks, saver]
    trainer = cpu_trainer(
        strategy=strategy,
        devices=1 if strategy_options["backend"] == "in_process" else job.num_ranks,
        max_epochs=job.max_epochs,
        enable_checkpointing=bool(job.saves_every),
        num_sanity_val_steps=0,
        callbacks=callbacks,
    )
    data = noisy_samples()
    trainer.fit(
        Module(journal),
        DataLoader(data, batch_size=BATCH_SIZE, shuffle=True),
        DataLoader(data, batch_size=50),
    )
    return trainer


def undisturbed(job: Job) -> tuple[Journal, float]:
    """Train on in-process ranks, and return the journal and the last validation's loss."""
    journal = Journal()
    trainer = train(job, journal, [], backend="in_process", num_ranks=job.num_ranks)
    return journal, trainer.callback_metrics["val_loss"].item()


def run_rank(job: Job) -> None:
    """Be one process of the job."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.filterwarnings("ignore")
    journal, lines = Journal(), _Lines(job.folder)
    journal.attempts = lines
    trainer = train(job, journal, [_Watch(job, lines)], backend="gloo", timeout=job.timeout)
    lines.write("ended", val_loss=trainer.callback_metrics["val_loss"].item())


def run_forked(job: Job, variables: Mapping[str, str]) -> None:
    """Be one process of the job, in a fork that has this environment."""
    os.environ.update(variables)
    log = os.open(Path(job.folder, f"{os.getpid()}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    run_rank(job)


if __name__ == "__main__":
    run_rank(Job(**json.loads(sys.argv[1])))
