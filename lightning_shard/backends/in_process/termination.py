"""SIGTERM to a process whose ranks are threads: all of them stop before the same step.

    rank 0   step 7 ── step 8 ──────────────── stops before step 9
    rank 1   step 7 ──────── SIGTERM, step 8 ── stops before step 9

Python calls the handler on the main thread, rank 0's, whichever rank runs. So it only takes note,
and the first rank that begins a step afterwards says where all stop: before the first step that
nobody has begun.
"""

from collections import Counter

from lightning_shard.backends.in_process.scheduler import Scheduler


class Termination:
    """Counts the steps of all ranks of a world, and says where they stop.

    Attributes:
        was_terminated: Whether this process has been sent SIGTERM.
        requeues: Whether it has been sent the signal by which SLURM has the job requeued, in time.
        has_stopped: Whether a rank has stopped because of a signal.
    """

    def __init__(self) -> None:
        self.was_terminated = self.requeues = self.has_stopped = False
        self._steps: Counter[int] = Counter()  # by thread
        self._stop_step: int | None = None
        self._asked: Scheduler | None = None

    @property
    def is_ending(self) -> bool:
        """Whether the ranks are stopping, so that a signal that comes again changes nothing."""
        return self.has_stopped

    def announce_requeue(self) -> None:
        """Have all ranks stop, to be started again; called by a signal's handler."""
        self.requeues = self.requeues or self._stop_step is None

    def announce_termination(self) -> None:
        """Have all ranks stop, or leave at the next boundary; called by a signal's handler."""
        self.was_terminated = True
        for rank in self._asked.ranks if self._asked is not None else ():
            rank.is_asked_to_leave = True

    def ask_to_leave(self, scheduler: Scheduler) -> None:
        """Have ranks asked to leave rather than stopped: they have boundaries of their own."""
        self._asked = scheduler

    def begin_step(self, thread: int) -> None:
        """Note that a rank is about to begin a step."""
        self._steps[thread] += 1
        if (self.was_terminated or self.requeues) and self._stop_step is None:
            others = [steps for one, steps in self._steps.items() if one != thread]
            self._stop_step = max(self._steps[thread], max(others, default=0) + 1)

    def stops(self, thread: int) -> bool:
        """Whether a rank has come to the step before which all stop."""
        return self._stop_step is not None and self._steps[thread] >= self._stop_step


class RanksTermination:
    """One rank's view of the `Termination`: what a `Lifeline` is to ranks that are processes.

    Args:
        shared: The world's one `Termination`, which all ranks share.
        thread: Number of this rank's thread.
    """

    terminated_rank: int | None = None  # all ranks at once

    def __init__(self, shared: Termination, thread: int) -> None:
        self._shared, self._thread = shared, thread

    @property
    def was_terminated(self) -> bool:
        """Whether this process has been sent SIGTERM."""
        return self._shared.was_terminated

    @property
    def requeues(self) -> bool:
        """Whether all ranks stop because SLURM will start the job again."""
        return self._shared.requeues

    @property
    def stops(self) -> bool:
        """Whether this rank has come to the step before which all ranks stop."""
        return self._shared.stops(self._thread)

    def step(self) -> bool:
        """Begin a step of the run; return whether to stop before it, as every rank does."""
        self._shared.begin_step(self._thread)
        self._shared.has_stopped = self._shared.has_stopped or self.stops
        return self.stops
