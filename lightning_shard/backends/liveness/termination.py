"""The effects of one SIGTERM on a rank, of repeated ones, and of SLURM's signal to requeue."""

import os
import signal
from time import monotonic
from typing import Protocol

TERMINATED_STATUS = 128 + signal.SIGTERM

# Under SLURM both the scheduler and torchrun send the signal to every rank: that is one wish.
TOGETHER_SECONDS = 5.0


class Terminable(Protocol):
    """An object that is told of a SIGTERM: a lifeline, or an elastic run's membership."""

    @property
    def is_ending(self) -> bool:
        """Whether this process is ending already, and perhaps saves what there is."""

    def announce_termination(self) -> None:
        """Tell the other ranks that this one was sent SIGTERM."""


class Requeueable(Protocol):
    """An object that is told of the signal by which SLURM says that it will start a job again."""

    def announce_requeue(self) -> None:
        """Tell the other ranks that they end here, and that rank 0 has the job requeued."""


class RepeatedSignal:
    """Counts the SIGTERMs that come in one way; the first tells the others, a later one ends all.

    A signal may come in two ways, long after each other when the main thread is busy: each way
    has one of these.
    """

    def __init__(self) -> None:
        self._first = float("inf")

    def come(self, told: Terminable) -> None:
        """Take note of a signal; end the process at one that comes again after a while."""
        now = monotonic()
        self._first = min(self._first, now)
        insists = now - self._first > TOGETHER_SECONDS
        # The rank may be ending already: mpirun sends the signal repeatedly, and SLURM once more at
        # the end of the grace period, half a minute before it kills.
        if insists and not told.is_ending:
            os._exit(TERMINATED_STATUS)
        told.announce_termination()
