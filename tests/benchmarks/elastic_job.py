"""One rank of the jobs that `elastic.py` measures: the example GPT, and a clock that tells.

    python -m tests.benchmarks.elastic_job FOLDER --ranks 4 --scheme elastic

Every rank writes what it did, and when, into a file of its own in the folder, a JSON object a line;
the clock is the host's, so that times of different processes can be compared. On standard input a
job that takes turns is told when to go on, and a newcomer when to join.

    kill ──> reconfigure ──> ... ──> step        in a recovery, the time up to
              │ noticed   │ snapshot found   │ engine made ...       each of `PARTS`
"""

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import torch
from typing_extensions import override

from examples.train_gpt import GPT, Text
from lightning_shard import ElasticStrategy, ZeRO2Strategy
from lightning_shard.elastic.membership.generation import Generation
from tests.trainers import cpu_trainer

NEVER = 1 << 40
TURN_STEPS = 20  # that count; there is one more, which warms up
PARTS = (
    "detection",
    "dropping the groups",
    "agreement on members",
    "groups",
    "agreement on a snapshot",
    "engine",
    "state",
    "loops and data",
    "snapshot",
    "first batch",
    "step",
)


class Timed(ElasticStrategy):
    """Notes when each part of a recovery ends.

    Attributes:
        marks: By part, when it ended in the last recovery.
    """

    def __init__(self, snapshot_every: int) -> None:
        super().__init__(backend="gloo", timeout=60, snapshot_every=snapshot_every)
        self.marks: dict[str, float] = {}

    @override
    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        run: Any = self._run
        run.reconfigure = self._timed(run.reconfigure, before=self._begin_recovery)
        take_over = run.data_assignment.take_over
        run.data_assignment.take_over = self._timed(take_over, before=self._marking("state"))
        run._memory.remember = self._timed(
            run._memory.remember,
            before=self._marking("loops and data"),
            after=self._marking("snapshot"),
        )

    @override
    def drop_generation(self) -> None:
        super().drop_generation()
        self._mark("dropping the groups")

    @override
    def join_generation(self, generation: Generation) -> None:
        self._mark("agreement on members")
        super().join_generation(generation)
        self._mark("groups")

    @override
    def rebuild_engine(self) -> None:
        self._mark("agreement on a snapshot")
        super().rebuild_engine()
        self._mark("engine")

    def _begin_recovery(self) -> None:
        self.marks = {"detection": time.monotonic()}

    def _mark(self, part: str) -> None:
        if self.marks:  # in a recovery, or behind one
            self.marks.setdefault(part, time.monotonic())

    def _marking(self, part: str) -> Callable[[], None]:
        return lambda: self._mark(part)

    def _timed(
        self,
        function: Callable[..., Any],
        *,
        before: Callable[[], None],
        after: Callable[[], None] = lambda: None,
    ) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before()
            result = function(*args, **kwargs)
            after()
            return result

        return timed

    def snapshot_bytes(self) -> int:
        """All host memory that snapshots take here, idle buffers included."""
        assert self._run is not None
        memory = self._run._memory
        ring, buffers = memory._ring, memory._buffers
        tensors = [one.data for one in memory.held] if ring is None else _data_of(ring)
        storages = {
            tensor.data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in [*tensors, *buffers._idle]  # type: ignore[attr-defined]
        }
        return sum(storages.values())


def _data_of(ring: Any) -> Iterator[torch.Tensor]:
    yield from (one.data for one in ring._complete)
    if ring._pending is not None:
        yield ring._pending.buffer


class Diary(L.Callback):
    """Writes down each step of this rank; takes turns with other jobs if told to.

    Args:
        takes_turns: Whether rank 0 reads a line before each turn: `snapshot_every` from now on.
    """

    def __init__(self, folder: Path, *, takes_turns: bool) -> None:
        self._path = Path(folder, f"{os.getpid()}.jsonl")
        self._takes_turns = takes_turns
        self._step = self._turn_step = 0
        self._generation = -1
        self._begin = (0.0, 0.0)
        self._held = 0

    def write(self, what: str, **values: Any) -> None:
        """Write one line."""
        line = {"what": what, "time": time.monotonic(), "pid": os.getpid(), **values}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if isinstance(trainer.strategy, Timed):
            trainer.strategy.marks.setdefault("first batch", time.monotonic())
        if not self._takes_turns or self._turn_step > 0 or trainer.global_step != self._step:
            return
        told = ""
        if trainer.is_global_zero:
            self.write("waits")
            told = sys.stdin.readline()
        told = trainer.strategy.broadcast(told)
        if told.strip() == "":
            trainer.should_stop = True
        elif isinstance(trainer.strategy, Timed):
            assert trainer.strategy.elastic_run is not None
            fit: Any = trainer.strategy.elastic_run._fit
            trainer.strategy.elastic_run._fit = replace(fit, snapshot_every=int(told))

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        if self._takes_turns and self._turn_step == 0:
            assert isinstance(trainer.strategy, ElasticStrategy | ZeRO2Strategy)
            self._held = trainer.strategy.held_bytes().total

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        generation = getattr(trainer.strategy, "generation", None)
        number = 0 if generation is None else generation.number
        if (number, trainer.global_step) == (self._generation, self._step):
            return  # more batches make up this step
        is_first, self._generation = number != self._generation, number
        self._step = trainer.global_step
        if self._takes_turns:
            self._count(trainer)
            return
        marks = getattr(trainer.strategy, "marks", {}) if is_first else {}
        self.write(
            "step",
            step=self._step,
            rank=trainer.global_rank,
            size=trainer.world_size,
            generation=number,
            marks=marks,
        )

    def _count(self, trainer: L.Trainer) -> None:
        self._turn_step += 1
        now = time.monotonic(), time.process_time()
        if self._turn_step == 1:
            self._begin = now
        if self._turn_step <= TURN_STEPS:
            return
        self._turn_step = 0
        seconds, cpu_seconds = (
            (end - begin) / TURN_STEPS for end, begin in zip(now, self._begin, strict=True)
        )
        strategy = trainer.strategy
        self.write(
            "turn",
            rank=trainer.global_rank,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            held_bytes=self._held,
            snapshot_bytes=strategy.snapshot_bytes() if isinstance(strategy, Timed) else 0,
        )


def main() -> None:
    """Train until told to end."""
    options = _options()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    diary = Diary(options.folder, takes_turns=options.takes_turns)
    strategy: Any = ZeRO2Strategy(backend="gloo")
    if options.scheme == "elastic":
        strategy = Timed(snapshot_every=options.snapshot_every)
    trainer = cpu_trainer(
        strategy=strategy,
        devices=options.ranks,
        max_epochs=-1,
        limit_val_batches=0,
        gradient_clip_val=1.0,
        callbacks=[diary],
    )
    gpt, text = GPT(width=options.width), Text(batch_size=options.batch_size)
    if options.waits:
        diary.write("waits")
        sys.stdin.readline()
    trainer.fit(gpt, datamodule=text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.elastic_job")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--scheme", choices=["elastic", "zero2"], required=True)
    parser.add_argument("--snapshot-every", type=int, default=10)
    parser.add_argument("--takes-turns", action="store_true")
    parser.add_argument("--waits", action="store_true", help="to join until it reads a line")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    main()
