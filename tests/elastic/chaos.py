"""Chaos: strikes at the processes of an elastic job at random steps, and reads what they have done.

    driver ── gate: how far ranks may go ──────────> ranks
           <─ journals: who has come how far ───────
           ── kill, SIGTERM, SIGSTOP, newcomers ──>

The driver counts in steps, never in seconds: the ranks stand at the gate until it has declared dead
as often as it was told to, however slow the machine is. At least two ranks train at any time.
"""

import json
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.elastic.chaos_job import Job
from tests.elastic.chaos_processes import Processes, await_that, ticks
from tests.elastic.runs import Attempt, Journal

LONGEST_SECONDS = 60.0  # for a job to get a step further
_OPEN = 1 << 60
_KINDS = {"kill": 6, "leave": 3, "stop": 2, "pause": 2, "two": 2, "stillborn": 2, "add": 3}


@dataclass
class Seen:
    """What the journals say so far.

    Attributes:
        ended: The last validation's loss of each process that has come to the end.
    """

    attempts: list[Attempt] = field(default_factory=list)
    steps: dict[int, list[dict[str, int]]] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    up: set[int] = field(default_factory=set)
    offsets: dict[Path, int] = field(default_factory=dict)

    def read(self, folder: str) -> None:
        """Take in what was written since the last time."""
        for path in Path(folder).glob("*.journal"):
            with path.open("rb") as file:
                file.seek(self.offsets.get(path, 0))
                full, _, _ = file.read().rpartition(b"\n")
            if full:
                self.offsets[path] = self.offsets.get(path, 0) + len(full) + 1
                for line in full.splitlines():
                    self._take(int(path.stem), json.loads(line))

    def _take(self, process: int, line: dict[str, Any]) -> None:
        match line.pop("kind"):
            case "up":
                self.up.add(process)
            case "attempt":
                tuples = {name: tuple(line.pop(name)) for name in ("samples", "losses")}
                self.attempts.append(Attempt(**line, **tuples))
            case "step":
                self.steps.setdefault(process, []).append(line)
            case "ended":
                self.ended[process] = line["val_loss"]

    def journal(self) -> Journal:
        """All attempts, by generation."""
        return Journal(attempts=sorted(self.attempts, key=lambda one: one.generation))

    @property
    def generation(self) -> int:
        """The newest in which a rank has begun a step."""
        return max((steps[-1]["generation"] for steps in self.steps.values()), default=0)

    @property
    def size(self) -> int:
        """The number of ranks in the newest generation."""
        newest = self.generation
        return next(p[-1]["size"] for p in self.steps.values() if p[-1]["generation"] == newest)

    def members(self) -> dict[int, int]:
        """The processes that train in the newest generation, by rank."""
        last = {process: steps[-1] for process, steps in self.steps.items()}
        newest = self.generation
        return {one["rank"]: p for p, one in last.items() if one["generation"] == newest}

    def step(self) -> int:
        """How far the newest generation has come."""
        return max(self.steps[process][-1]["step"] for process in self.members().values())

    def num_copied(self) -> int:
        """The steps that every rank has done in the newest generation, beyond the first.

        After the first its first snapshots are at the buddies.
        """
        newest, done = self.generation, []
        for process in self.members().values():
            own = [one["step"] for one in self.steps[process] if one["generation"] == newest]
            done.append(max(own) - min(own) - 1)
        return min(done)


class Chaos:
    """Disturbs one job.

    Args:
        by_launcher: Start with Lightning's launcher, and newcomers by the printed command at times.
    """

    def __init__(self, job: Job, seed: int, *, by_launcher: bool) -> None:
        self.job = job
        self.processes = Processes(job)
        self.seen = Seen()
        self.events: list[str] = []
        self._chance = random.Random(seed)
        self._by_launcher = by_launcher
        self._newcomers: set[int] = set()  # that are to join

    def run(self, kinds: list[str], *, ends_well: bool = True) -> None:
        """Start the job, make something of each kind happen, and wait for the job's end.

        Args:
            kinds: See `_KINDS`; "any" for a random one. Also "first" and "server".
            ends_well: Whether the training is to come to its end.
        """
        try:
            self._open_gate(0)
            if self._by_launcher:
                self.processes.start_by_launcher()
            else:
                self.processes.start_by_fork()
            self._await(
                lambda: len(self.seen.members()) == self.job.num_ranks, "all have come", 3.0
            )
            self._go_on(self.job.saves_every)
            for kind in kinds:
                self._go_on(self._chance.randint(1, 6))
                self._strike(kind)
            self._open_gate(_OPEN)
            if ends_well:
                self._await(lambda: bool(self.seen.ended), "the training has ended", 5.0)
            self.processes.wait_until_all_have_ended(30.0)
        except (TimeoutError, ValueError, KeyError) as error:
            self.processes.end()
            raise AssertionError(
                f"{error}\nevents: {self.events}\n{self.processes.report()}"
            ) from error
        finally:
            self.processes.end()
            self._look()

    # --- how far ranks go -------------------------------------------------------------------------

    def _open_gate(self, step: int) -> None:
        new = Path(self.job.folder, "gate.new")
        new.write_text(str(step))
        new.rename(Path(self.job.folder, "gate"))

    def _look(self) -> None:
        self.seen.read(self.job.folder)

    def _await(self, is_so: Any, what: str, factor: float = 1.0) -> None:
        def look() -> bool:
            self._look()
            return bool(is_so())

        await_that(look, what, factor * LONGEST_SECONDS)

    def _go_on(self, num_steps: int) -> None:
        """Let the ranks train, at least so far, until a further loss can be borne."""
        goal = self.seen.step() + num_steps
        self._open_gate(goal + 1)
        self._await(lambda: self.seen.step() >= goal, f"somebody begins step {goal}")
        if not self.job.saves_every:
            self._let_train_until(self._is_copied, "the snapshots are at the buddies")

    def _is_copied(self) -> bool:
        """Whether each rank of the newest generation lives, and its buddy has its snapshot."""
        is_full = len(self._ranks()) == self.seen.size
        return is_full and self.seen.num_copied() > 0

    def _let_train_until(self, is_so: Any, what: str) -> None:
        """Open the gate step by step until it is so."""
        gate = self.seen.step()
        for _ in ticks(LONGEST_SECONDS):
            self._look()
            if is_so():
                return
            if gate <= self.seen.step() + 1:
                gate = self.seen.step() + 2
                self._open_gate(gate)
        raise TimeoutError(f"Waited until {what}.")

    # --- strikes ----------------------------------------------------------------------------------

    def _strike(self, kind: str) -> None:
        if len(self._ranks()) <= 2:
            self._let_newcomers_join()
        ranks = self._ranks()
        if kind == "any":
            kind = self._choose(len(ranks))
        self.events.append(f"{kind} at step {self.seen.step()} of {sorted(ranks)}")
        time.sleep(self._chance.random() * 0.06)  # anywhere in a step
        getattr(self, f"_{kind}")(ranks)

    def _choose(self, num_ranks: int) -> str:
        allowed = dict(_KINDS)
        if num_ranks <= 2:
            allowed = {kind: allowed[kind] for kind in ("add", "pause", "stillborn")}
        if num_ranks != 4:  # of four, the first and the third are no buddies
            allowed.pop("two", None)
        if num_ranks + len(self._newcomers) >= 5:
            allowed.pop("add", None)
        return self._chance.choices(list(allowed), list(allowed.values()))[0]

    def _ranks(self) -> dict[int, int]:
        """Who trains, by rank."""
        members, processes = self.seen.members(), self.processes
        return {
            rank: process
            for rank, process in members.items()
            if process not in processes.struck and processes.runs(process)
        }

    def _pick(self, ranks: dict[int, int]) -> int:
        return self._chance.choice(sorted(ranks.values()))

    def _kill(self, ranks: dict[int, int]) -> None:
        self.processes.strike(self._pick(ranks), signal.SIGKILL)

    def _first(self, ranks: dict[int, int]) -> None:
        """Kill rank 0."""
        self.processes.strike(ranks[0], signal.SIGKILL)

    def _server(self, ranks: dict[int, int]) -> None:
        """Kill the job's rendezvous server."""
        self.processes.strike(self.processes.server(), signal.SIGKILL)

    def _leave(self, ranks: dict[int, int]) -> None:
        process = self._pick(ranks)
        self.processes.strike(process, signal.SIGTERM)
        self._let_train_until(lambda: not self.processes.runs(process), f"{process} has left")

    def _two(self, ranks: dict[int, int]) -> None:
        """Kill two, both at once or one during the reconfiguration; buddies if there are files."""
        first = self._chance.randrange(2)
        second = self._chance.choice([first + 1, first + 2]) if self.job.saves_every else first + 2
        self.processes.strike(ranks[first], signal.SIGKILL)
        time.sleep(self._chance.choice([0.0, 0.3, 0.6]) * self._chance.random())
        self.processes.strike(ranks[second], signal.SIGKILL)

    def _pause(self, ranks: dict[int, int]) -> None:
        """Stop a rank, but not for long: nobody is to be lost."""
        process = self._pick(ranks)
        self.processes.signal(process, signal.SIGSTOP)
        time.sleep(0.1 * self.job.timeout)
        self.processes.signal(process, signal.SIGCONT)

    def _stop(self, ranks: dict[int, int]) -> None:
        """Stop a rank until the others have given it up; then let it run: it comes back."""
        process, before = self._pick(ranks), self.seen.generation
        self.processes.signal(process, signal.SIGSTOP)
        self._let_train_until(
            lambda: self.seen.generation > before and self._last_of(process) <= before,
            f"the others go on without {process}",
        )
        self.processes.signal(process, signal.SIGCONT)
        self._let_train_until(lambda: self._last_of(process) > before, f"{process} is back")

    def _last_of(self, process: int) -> int:
        return self.seen.steps[process][-1]["generation"]

    def _add(self, ranks: dict[int, int]) -> None:
        by_command = self._by_launcher and self._chance.random() < 0.3
        process = self.processes.add(by_command=by_command)
        self._newcomers.add(process)
        self._await(lambda: process in self.seen.up, f"{process} has started")
        if self._chance.random() < 0.5:  # else the next strike may come as it joins
            self._let_newcomers_join()

    def _let_newcomers_join(self) -> None:
        self._let_train_until(lambda: self._newcomers <= {*self.seen.steps}, "newcomers join")
        self._newcomers.clear()

    def _stillborn(self, ranks: dict[int, int]) -> None:
        """Kill a newcomer before it has joined, or as it does."""
        process = self.processes.add(by_command=False)
        until = time.monotonic() + self._chance.random() * 2.0
        self._let_train_until(lambda: time.monotonic() > until, "the newcomer has come far")
        self.processes.strike(process, signal.SIGKILL)
