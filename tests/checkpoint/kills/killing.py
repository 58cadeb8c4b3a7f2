"""Trainings that are killed at random moments; the next one goes on where the last was saved.

    python -m tests.checkpoint.kills.killing --kills 100 --folder /dev/shm --backend in_process

A process forks each training from what it has imported, kills it, and looks at what is there.
"""

import argparse
import gc
import json
import logging
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from lightning_shard.checkpoint.files.parts import is_leftover
from tests.checkpoint.kills.trainings import Case, Dies, Digests, Saves, read
from tests.processes import free_port

OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MOST_LINES = 9  # told before the kill: three steps


class Told(NamedTuple):
    """What a training has told until it ended; steps are -1 where it has told none."""

    begun: int
    saved: int
    is_saving: bool

    @classmethod
    def of(cls, lines: Sequence[str]) -> "Told":
        """Read what the training has written."""
        last = {"begin": -1, "saved": -1}
        for line in lines:
            what, _, step = line.partition(" ")
            last[what] = int(step)
        is_saving = bool(lines) and lines[-1].startswith("save ")
        return cls(last["begin"], last["saved"], is_saving)


def forked(function: Callable[[], Any]) -> int:
    """Run a function in a child; return its process."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def start(case: Case, train: Callable[[], Any]) -> list[int]:
    """Start the processes of a training; return them."""
    num_processes = 1 if case.backend == "in_process" else 2
    port = free_port()

    def run(rank: int) -> None:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        for name in OF_RANKS:
            os.environ.pop(name, None)
        if num_processes > 1:
            place = (rank, rank, num_processes, "127.0.0.1", port)
            os.environ |= dict(zip(OF_RANKS, map(str, place), strict=True))
        train()

    return [forked(lambda rank=rank: run(rank)) for rank in range(num_processes)]  # type: ignore[misc]


def digests_of(case: Case, folder: Path | None = None) -> dict[int, str]:
    """Train from the start, or from a folder, to the end; return the digest of each step."""
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(scratch, "digests")

        def note() -> None:
            digests = Digests()
            resume = {} if folder is None else {"resume": folder / "last.ckpt"}
            case._replace(format="full").fit(digests, **resume)
            if digests.by_step:  # on rank 0
                kept.write_bytes(pickle.dumps(digests.by_step))

        for process in start(case, note):
            assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        by_step: dict[int, str] = pickle.loads(kept.read_bytes())
    return by_step


@cache
def table(case: Case) -> dict[int, str]:
    """Return the digest of each step of a training that nobody kills."""
    digests = digests_of(case)
    assert sorted(digests) == list(range(1, case.num_steps + 1))
    assert len(set(digests.values())) == case.num_steps
    return digests


def after_a_kill(case: Case, rank: int, step: int) -> tuple[dict[int, str], dict[int, str]]:
    """Train with a kill in the middle of an epoch, and go on from the last checkpoint.

    Returns:
        The digests of an undisturbed training, by step, and those after the kill.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as there:
        folder = Path(there, "run")

        def die() -> None:
            saves = Saves(folder, os.open(os.devnull, os.O_WRONLY))
            case.fit(saves, Dies(rank, step), enable_checkpointing=True)

        statuses = [os.waitpid(process, 0)[1] for process in start(case, die)]
        assert -signal.SIGKILL in map(os.waitstatus_to_exitcode, statuses)
        return table(case._replace(format="full")), digests_of(case, folder)


def killed(case: Case, folder: Path, rng: random.Random) -> tuple[Told, bool]:
    """Train until a kill at a random moment; return what was told, and whether it was killed."""
    told, tells = os.pipe()

    def train() -> None:
        case.fit(Saves(folder, tells), resume="last", enable_checkpointing=True)

    processes = start(case, train)
    os.close(tells)
    with os.fdopen(told) as output:
        lines, seconds = _first_lines(output, rng.randint(1, MOST_LINES))
        time.sleep(rng.uniform(0, 1.5 * seconds))
        statuses = _kill(processes, rng, seconds)
        lines += output.read().splitlines()
    assert statuses[0] in {0, -signal.SIGKILL}, statuses
    return Told.of(lines), -signal.SIGKILL in statuses


def _first_lines(output: IO[str], number: int) -> tuple[list[str], float]:
    """Return lines, fewer where there are no more, and for how long the last was waited for."""
    lines, began = [], time.monotonic()
    for _ in range(number):
        began = time.monotonic()
        if not (line := output.readline()):
            break
        lines.append(line.strip())
    return lines, time.monotonic() - began if len(lines) > 1 else 0.05


def _kill(processes: list[int], rng: random.Random, seconds: float) -> list[int]:
    """Kill ranks, in any order, the others at once or later; return how they have ended."""
    statuses = []
    for number, process in enumerate(rng.sample(processes, len(processes))):
        time.sleep(rng.choice([0.0, seconds]) if number else 0.0)
        os.kill(process, signal.SIGKILL)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    return statuses


class Folder:
    """A folder in which trainings are killed."""

    def __init__(self, path: Path, case: Case, digests: dict[int, str], rng: random.Random) -> None:
        self._path, self._case, self._digests, self._rng = path, case, digests, rng
        self._leftovers: set[str] = set()
        self._steps: dict[str, int] = {}
        self.counts: Counter[str] = Counter()

    def kill(self) -> None:
        """Kill one training, and check what is there after it."""
        told, was_killed = killed(self._case, self._path, self._rng)
        expected = self._steps.get("last.ckpt", 0)
        assert told.begun in ({expected} if told.begun >= 0 else {-1}), (told, self._steps)
        before = self._leftovers
        self._look(told)
        self.counts["kills"] += was_killed
        self.counts["while saving"] += was_killed and told.is_saving
        self.counts["leaving something"] += was_killed and bool(self._leftovers - before)
        if self._steps.get("last.ckpt", 0) == self._case.num_steps:
            shutil.rmtree(self._path)
            self._leftovers, self._steps = set(), {}

    def _look(self, told: Told) -> None:
        names = set(os.listdir(self._path)) if self._path.is_dir() else set()
        leftovers = {name for name in names if is_leftover(name)}
        assert all(
            name.endswith(".ckpt") and not name.startswith(".") for name in names - leftovers
        )
        if told.saved >= 0:  # a save has begun and ended since, which has removed what there was
            assert not leftovers & self._leftovers
        self._steps = {}
        for name in sorted(names - leftovers):
            step, digest = read(self._path / name)
            assert digest == self._digests[step], f"{name} is not what was trained in step {step}"
            self._steps[name] = step
            self.counts["checkpoints read"] += 1
        in_flight = self._case.format == "async"
        assert max(self._steps.values(), default=0) >= told.saved - in_flight, (told, self._steps)
        assert self._steps.get("last.ckpt", 0) >= max(told.begun, told.saved - in_flight)
        self._leftovers = leftovers


def kill_many(case: Case, root: str | None, *, kills: int, seed: int) -> dict[str, int]:
    """Kill trainings in a folder of their own; return counts of what was seen."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a training that collects garbage would copy all of it
    digests = table(case._replace(format="full"))
    with tempfile.TemporaryDirectory(prefix="lightning_shard_kills_", dir=root) as there:
        folder = Folder(Path(there, "run"), case, digests, random.Random(seed))
        while folder.counts["kills"] < kills:
            folder.kill()
    return dict(folder.counts)


def main() -> None:
    """Kill as the command line says, and print the counts of each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--backend", default="in_process")
    parser.add_argument("--schemes", nargs="+", default=["zero3", "shard_ddp"])
    parser.add_argument("--formats", nargs="+", default=["full", "sharded", "async"])
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    for scheme in chosen.schemes:
        for kind in chosen.formats:
            case = Case(scheme, kind, chosen.backend)
            began = time.monotonic()
            counts = kill_many(case, chosen.folder, kills=chosen.kills, seed=chosen.seed)
            seconds = time.monotonic() - began
            print(json.dumps({"case": case, **counts, "seconds": round(seconds)}), flush=True)


if __name__ == "__main__":
    main()
