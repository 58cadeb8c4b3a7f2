"""Processes that judge programs, and the watchdog that ends one whose program hangs.

main process    Worker 0 ── task ──>  process    judged(features, seed, scheme)
                         <─ outcome ─
                Worker 1 ...          none within the limit: killed by its number, started anew
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.fuzz.run import DEFECT, Outcome, judged

LIMIT_SECONDS = 300.0  # a run takes half a second; under load, and in processes, many


@dataclass(frozen=True)
class Task:
    """A program and a scheme; `key` is for whoever asked."""

    features: tuple[str, ...]
    seed: int
    scheme: str
    key: Any = None


class Worker:
    """A process that judges one task after the other.

    Args:
        mistake: Name of one of `planted.MISTAKES` that the package has in this process.
    """

    def __init__(self, mistake: str | None = None, limit_seconds: float = LIMIT_SECONDS) -> None:
        self._mistake, self._limit = mistake, limit_seconds
        self.task: Task | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, self._mistake), daemon=False)
        self._process.start()
        theirs.close()
        self.pipe.recv()  # it has imported all that it needs

    def give(self, task: Task) -> None:
        """Have it judge a task."""
        self.task, self._until = task, time.monotonic() + self._limit
        self.pipe.send(task)

    def outcome(self) -> Outcome | None:
        """Return what came of its task; None if nothing did yet. A worker that hangs is ended."""
        if self.pipe.poll():
            try:
                found: Outcome = self.pipe.recv()
            except EOFError:
                self._process.join()
                found = Outcome(DEFECT, f"the process ended with {self._process.exitcode}")
                self._start()
            return found
        if time.monotonic() > self._until:
            self.end()
            self._start()
            return Outcome(DEFECT, "hangs", f"no end within {self._limit:.0f} s")
        return None

    def end(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join()
        self.pipe.close()


@contextlib.contextmanager
def workers(count: int, mistake: str | None = None) -> Iterator[list[Worker]]:
    """Start workers, and end them."""
    started = [Worker(mistake) for _ in range(count)]
    try:
        yield started
    finally:
        for worker in started:
            worker.end()


def outcomes(pool: Sequence[Worker], tasks: Iterable[Task]) -> Iterator[tuple[Task, Outcome]]:
    """Yield tasks with what came of them, as they are done."""
    left, idle = iter(tasks), list(pool)
    busy: list[Worker] = []
    while True:
        while idle and (task := next(left, None)) is not None:
            worker = idle.pop()
            worker.give(task)
            busy.append(worker)
        if not busy:
            return
        wait([worker.pipe for worker in busy], timeout=0.5)
        for worker in list(busy):
            found = worker.outcome()
            if found is not None:
                assert worker.task is not None
                busy.remove(worker)
                idle.append(worker)
                yield worker.task, found


def _work(pipe: Connection, mistake: str | None) -> None:
    """Judge what comes through the pipe, until it is closed; speak to nobody else."""
    os.environ["OMP_NUM_THREADS"] = "1"
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    if mistake is not None:
        importlib.import_module("tests.fuzz.planted").plant(mistake)
    gc.collect()
    gc.freeze()  # what was imported is left out of the collections that runs make
    pipe.send(None)
    while True:
        try:
            task: Task = pipe.recv()
        except EOFError:
            return
        pipe.send(judged(task.features, task.seed, task.scheme))
