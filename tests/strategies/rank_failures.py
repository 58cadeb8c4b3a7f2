"""Three ranks train, and one of them is killed, terminated or stopped: how do the others end?

Ranks over Gloo are forked from one process that has imported everything; ranks over MPI are started
by mpirun. Each writes its process number, its steps and its end into a folder.
"""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard import ZeRO2Strategy
from tests.mpirun import mpirun, read_log
from tests.patience import patient
from tests.processes import free_port
from tests.trainers import cpu_trainer

WORLD_SIZE = 3
EVERYBODY = -1
MANY_STEPS = 1_000_000
_STARTING_SECONDS = 60
# What is sent to a rank, and what the others then say of it.
SIGNALS = {
    signal.SIGKILL: "died",
    signal.SIGTERM: "received SIGTERM",
    signal.SIGSTOP: "fell silent",
}


@dataclass(frozen=True, kw_only=True)
class Training:
    """What every rank is told.

    Attributes:
        victim: The rank to which something happens, or EVERYBODY.
        event: What it does by itself: "raise" or "exit" in its fourth step, "end early" one step
            before the others, "hang" if the last rank never ends its second; "" for nothing.
        grace: Seconds in which their next step must come after SIGTERM.
    """

    backend: str = "gloo"
    timeout: float = 10
    victim: int = 1
    event: str = ""
    num_workers: int = 0
    max_steps: int = MANY_STEPS
    saves: bool = False
    grace: float = 30


@dataclass(frozen=True, kw_only=True)
class End:
    """How a rank ended.

    Attributes:
        error: The type of what `trainer.fit` raised; "" for nothing, "none in time" when the rank
            was ended before.
        seconds: When, after what happened to the victim.
        output: All that the rank printed; under mpirun all that any rank did.
    """

    rank: int
    error: str
    message: str
    seconds: float
    output: str


class FailingModel(BoringModel):
    """Does in its fourth step what it was told to."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.training_options = training

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        training = self.training_options
        if training.event == "hang" and self.global_rank == WORLD_SIZE - 1 and self.global_step:
            self.trainer.callbacks[0].write()  # type: ignore[attr-defined]
            time.sleep(10_000)
        if self.global_rank == training.victim and self.global_step == 3:
            if training.event == "raise":
                raise ValueError("on purpose")
            if training.event == "exit":
                sys.exit(0)
        is_before_last = self.global_step == training.max_steps - 2
        if training.event == "end early" and self.global_rank == training.victim and is_before_last:
            self.trainer.fit_loop.epoch_loop.max_steps -= 1  # after which ranks compare no more
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader[Tensor]:
        data = RandomDataset(32, 6 * 1000)
        return DataLoader(data, batch_size=2, num_workers=self.training_options.num_workers)


class WritesSteps(pl.Callback):
    """Writes how many steps there were."""

    def __init__(self, file: Path, *, waits: bool) -> None:
        self._file, self._waits = file, waits

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self._waits:
            self.write(str(trainer.global_step))

    def write(self, steps: str = "") -> None:
        _write(self._file, steps)


def train_rank(folder: Path, rank: int, training: Training) -> None:
    """Be one rank: train, and write how that ends."""
    _write(folder / f"pid_{rank}", str(os.getpid()))
    torch.set_num_threads(1)
    os.environ["LIGHTNING_SHARD_GRACE_SECONDS"] = str(training.grace)
    hangs = training.event == "hang" and rank == WORLD_SIZE - 1
    callbacks: list[pl.Callback] = [WritesSteps(folder / f"steps_{rank}", waits=hangs)]
    if training.saves:
        callbacks.append(OnExceptionCheckpoint(folder, "stopped"))
    trainer = cpu_trainer(
        devices=WORLD_SIZE,
        strategy=ZeRO2Strategy(backend=training.backend, timeout=training.timeout),
        max_steps=training.max_steps,
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=callbacks,
        enable_checkpointing=training.saves,
    )
    error: BaseException | None = None
    try:
        trainer.fit(FailingModel(training))
    except BaseException as raised:
        error = raised
        raise
    finally:
        end = {"error": type(error).__name__ if error else "", "message": str(error or "")}
        _write(folder / f"end_{rank}", json.dumps(end | {"seconds": time.time()}))


def _write(file: Path, text: str) -> None:
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(file)


def ends(
    training: Training, sent: signal.Signals | None = None, folder: Path | None = None
) -> list[End]:
    """Return how each rank ended; the victim is sent a signal once all have made some steps."""
    if folder is None:
        with tempfile.TemporaryDirectory() as name:
            return ends(training, sent, Path(name))
    with _ranks(folder, training):
        return _observe(folder, training, sent)


def _observe(folder: Path, training: Training, sent: signal.Signals | None) -> list[End]:
    ranks = range(WORLD_SIZE)
    since = time.time()
    expected = list(ranks)
    if sent is not None:
        if not _await([folder / f"steps_{rank}" for rank in ranks], _STARTING_SECONDS):
            logs = [read_log(folder, rank) for rank in ranks]
            raise AssertionError("the ranks did not start:\n" + "\n---\n".join(logs))
        victims = ranks if training.victim == EVERYBODY else [training.victim]
        processes = [int((folder / f"pid_{rank}").read_text()) for rank in victims]
        since = time.time()
        for process in processes:
            os.kill(process, sent)
        if sent != signal.SIGTERM:
            expected.remove(training.victim)
    if training.event == "hang":
        expected.remove(WORLD_SIZE - 1)
        _await_words("and is ended", folder, WORLD_SIZE - 1)
    _await([folder / f"end_{rank}" for rank in expected], _STARTING_SECONDS + training.timeout)
    return [_end(folder, rank, since) for rank in ranks]


def _await(files: list[Path], seconds: float) -> bool:
    deadline = time.monotonic() + patient(seconds)
    while not (come := all(file.exists() for file in files)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return come


def _await_words(words: str, folder: Path, rank: int) -> None:
    deadline = time.monotonic() + patient(_STARTING_SECONDS)
    while words not in (log := read_log(folder, rank)):
        assert time.monotonic() < deadline, log
        time.sleep(0.1)


def _end(folder: Path, rank: int, since: float) -> End:
    file, output = folder / f"end_{rank}", read_log(folder, rank)
    if not file.exists():
        return End(rank=rank, error="none in time", message="", seconds=-1.0, output=output)
    written = json.loads(file.read_text())
    written["seconds"] -= since
    return End(rank=rank, output=output, **written)


def _ranks(folder: Path, training: Training) -> AbstractContextManager[object]:
    """Start the ranks, and see to it that none is left."""
    if training.backend == "gloo":
        return _forked_ranks(folder, training)
    command = [sys.executable, "-m", __name__, str(folder), json.dumps(asdict(training))]
    return mpirun(command, WORLD_SIZE, folder)


@contextmanager
def _forked_ranks(folder: Path, training: Training) -> Iterator[None]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    port = free_port()
    processes: list[Any] = [
        context.Process(target=_forked_rank, args=(folder, rank, port, training))
        for rank in range(WORLD_SIZE)
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()  # a stopped one too
        for process in processes:
            process.join()


def _forked_rank(folder: Path, rank: int, port: int, training: Training) -> None:
    with (folder / f"rank_{rank}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    multiprocessing.set_start_method("fork", force=True)  # as elsewhere, for DataLoaders
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD_SIZE),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    train_rank(folder, rank, training)


def is_right(end: End, training: Training, sent: signal.Signals) -> bool:
    """Say whether a survivor raised the error that names the victim, within the time-out."""
    return (
        end.error == "RankFailedError"
        and f"rank {training.victim} {SIGNALS[sent]}" in end.message
        and 0 <= end.seconds <= patient(training.timeout)
    )


if __name__ == "__main__":  # under mpirun
    train_rank(
        Path(sys.argv[1]),
        int(os.environ["OMPI_COMM_WORLD_RANK"]),
        Training(**json.loads(sys.argv[2])),
    )
