"""Ranks of an elastic job that are killed as its generations begin: how long the others wait.

    python -m tests.elastic.early_losses NUM_RANKS NUM_LOSSES SEED

    generation 2k-1 ──a newcomer──> generation 2k ──up to two seconds──> a rank is killed ──> 2k+1

Prints the seconds from each death to the first step without the dead rank, as JSON.
"""

import json
import os
import random
import signal
import sys
import tempfile
import time
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_shard.backends.base import GlooBackend
from lightning_shard.elastic.membership.generation import Generation, GroupSetup
from lightning_shard.elastic.membership.rendezvous_server import JobRules, start_rendezvous_server
from lightning_shard.elastic.membership.served_membership import ServedMembership
from lightning_shard.errors import RankFailedError

TIMEOUT = timedelta(minutes=10)  # who waits for so long stands still
_CHECK_SECONDS = 0.005


class Rank:
    """One process of the job, which writes down when it takes up a generation and steps in it."""

    def __init__(self, job: Any, initial_rank: int | None, folder: Path) -> None:
        torch.set_num_threads(1)
        self._folder = folder
        self._log = (folder / str(os.getpid())).open("w", buffering=1)
        self._membership = ServedMembership(job, initial_rank, TIMEOUT)

    def run(self) -> None:
        generation = self._membership.begin() or self._membership.following()
        while self._take_part(generation):
            generation = self._membership.following()
        self._membership.leave()

    def _take_part(self, generation: Generation) -> bool:
        """Step until there is a change; return whether the job goes on."""
        self._say("generation", generation.number)
        goes_on = True
        try:
            backend = GlooBackend()
            self._membership.init_groups(
                generation, GroupSetup(backend, torch.device("cpu"), TIMEOUT)
            )
            goes_on = self._step(generation, backend)
        except (RankFailedError, RuntimeError):
            pass
        self._membership.drop_groups()
        return goes_on

    def _step(self, generation: Generation, backend: GlooBackend) -> bool:
        collectives = backend.collectives(dist.group.WORLD)
        for step in count():
            dist.broadcast(torch.zeros(64), src=step % generation.size)  # waits in many orders
            wishes = [self._membership.is_wanted, (self._folder / "end").exists(), True]
            total = torch.tensor(wishes).int()
            collectives.all_reduce(total, "sum").wait()
            assert total[2] == generation.size
            if step == 0:
                self._say("step", generation.number)
            if total[:2].any():
                return not total[1]
            time.sleep(_CHECK_SECONDS)
        raise AssertionError

    def _say(self, kind: str, generation: int) -> None:
        print(json.dumps([kind, generation, time.monotonic()]), file=self._log)


class Driver:
    """Starts ranks, kills some, and reads what all have written down."""

    def __init__(self, num_ranks: int, folder: Path) -> None:
        rules = JobRules(initial_size=num_ranks, timeout_seconds=TIMEOUT.total_seconds())
        self._job = start_rendezvous_server(rules, "127.0.0.1", 0, "token of the tests")
        self._folder = folder
        self._living: set[int] = set()
        for rank in range(num_ranks):
            self.start(rank)
        self.wait_for("step", 0)

    def start(self, initial_rank: int | None) -> None:
        process = os.fork()
        if process == 0:
            status = 1
            try:
                Rank(self._job, initial_rank, self._folder).run()
                status = 0
            finally:
                os._exit(status)
        self._living.add(process)

    def wait_for(self, kind: str, after: int) -> tuple[int, dict[int, float]]:
        """Return the first generation after one of which this is told, and when by whom."""
        while not (found := {n: told for n, told in self._read(kind).items() if n > after}):
            time.sleep(_CHECK_SECONDS)
        return min(found.items())

    def _read(self, kind: str) -> dict[int, dict[int, float]]:
        told: dict[int, dict[int, float]] = {}
        for process in self._living:
            path = self._folder / str(process)
            for line in path.read_text().splitlines() if path.exists() else ():
                if line.endswith("]") and (one := json.loads(line))[0] == kind:
                    told.setdefault(one[1], {})[process] = one[2]
        return told

    def lose(self, chance: random.Random, *, is_full: bool) -> float:
        """Kill a rank as a generation begins; return how long the others needed to step again."""
        newest = max(self._read("generation"))
        if not is_full:
            self.start(None)
        number, begun = self.wait_for("generation", newest - is_full)
        delay = chance.choice((0.0, chance.uniform(0, 0.05), chance.uniform(0, 2.0)))
        while time.monotonic() < min(begun.values()) + delay:
            time.sleep(0.001)
        victim = chance.choice(sorted(begun))
        os.kill(victim, signal.SIGKILL)
        death = time.monotonic()
        os.waitpid(victim, 0)
        self._living.remove(victim)
        return min(self.wait_for("step", number)[1].values()) - death

    def end(self) -> list[int]:
        """Have the job end, and return what each process says."""
        (self._folder / "end").touch()
        return [os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in self._living]


def main(num_ranks: int, num_losses: int, seed: int) -> None:
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        driver = Driver(num_ranks, Path(folder))
        waits: list[float] = [driver.lose(chance, is_full=k == 0) for k in range(num_losses)]
        print(json.dumps({"seconds": waits, "statuses": driver.end()}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
