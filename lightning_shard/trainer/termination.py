"""Stops every rank before the same batch on a signal to any, so that there is time to save.

    rank 1  SIGTERM ─> handler ─> lifeline ─> hub ─> each rank says how many steps it has begun
    all     step 17   step 18   stop before step 19: SIGTERMException on rank 1,
                                RankFailedError "rank 1 received SIGTERM" on the others

SLURM's signal before it requeues a job goes the same way, and ends in SIGTERMException on all.

Lightning's own handlers broadcast, or save, inside the signal handler, where the other ranks do not
answer unless all get the signal at the same point. Here the ranks agree over the lifeline, beside
the data and at no cost for a step. Ranks that are threads of one process get the signal all at
once.

A fit stops before a batch is fetched, so that what is saved is that between two batches; and before
it ends, where no batch follows.
"""

import os
import signal
from types import FrameType

import lightning.pytorch as pl
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_shard.backends import liveness
from lightning_shard.backends.in_process.termination import RanksTermination
from lightning_shard.backends.in_process.world import current_world
from lightning_shard.errors import RankFailedError
from lightning_shard.launchers._lightning import mark_terminated
from lightning_shard.trainer._lightning import (
    forget_signal_handlers,
    handle_requeue,
    handle_sigterm,
    requeue_signal,
)


class TerminationHandler:
    """Handles SIGTERM: tells the other ranks, and ends the process when the signal comes again.

    Args:
        lifeline: Tells the other ranks of the signal.
    """

    def __init__(self, lifeline: liveness.Terminable) -> None:
        self._lifeline = lifeline
        self._process = os.getpid()
        self._sigterms = liveness.RepeatedSignal()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if os.getpid() != self._process:  # a forked child, which is no rank
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        self._sigterms.come(self._lifeline)


class RequeueHandler:
    """Handles SLURM's signal before it requeues the job: tells the other ranks.

    Args:
        lifeline: Tells the other ranks of the signal.
    """

    def __init__(self, lifeline: liveness.Requeueable) -> None:
        self._lifeline = lifeline
        self._process = os.getpid()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal, which a forked child that is no rank passes over."""
        if os.getpid() == self._process:
            self._lifeline.announce_requeue()


class CoordinatedShutdown(ParallelStrategy):
    """Counts the steps of a run, and ends it before the same one on every rank."""

    _lifeline: liveness.Lifeline | RanksTermination | None = None

    def watch_for_termination(self, trainer: "pl.Trainer") -> None:
        """Handle signals for this run; call before Lightning registers its handlers.

        Earlier handlers stay as Lightning composes them.
        """
        world = current_world()
        if world is not None:
            self._lifeline = world.ranks_termination()
            handle_sigterm(trainer, TerminationHandler(world.termination))
            handle_requeue(trainer, RequeueHandler(world.termination))
            return
        self._lifeline = lifeline = liveness.current()
        if lifeline is not None:
            lifeline.requeue_signal = requeue_signal(trainer)
            handle_sigterm(trainer, TerminationHandler(lifeline))
            handle_requeue(trainer, RequeueHandler(lifeline))
            liveness.watch_signals()

    def begin_step(self) -> None:
        """Begin a step; every rank must call before each of its steps.

        Raises:
            SIGTERMException: This rank was sent SIGTERM, or SLURM requeues the job; all ranks stop
                here.
            RankFailedError: Another rank was sent SIGTERM, or has failed.
        """
        if self._lifeline is None or not self._lifeline.step():
            return
        if self._lifeline.was_terminated or self._lifeline.requeues:
            if self.lightning_module is not None:
                mark_terminated(self.lightning_module.trainer)
            raise SIGTERMException(liveness.TERMINATED_STATUS)
        assert self.cluster_environment is not None
        rank, size = self.cluster_environment.global_rank(), self.cluster_environment.world_size()
        raise RankFailedError(
            f"Rank {rank} of {size} stopped because rank {self._lifeline.terminated_rank} received "
            f"SIGTERM: somebody ended the job, its scheduler for example. All ranks stopped before "
            f"the same step. Go on from what is saved there (ckpt_path='last'), or from the last "
            f"checkpoint."
        )

    @property
    def agrees_on_shutdown(self) -> bool:
        """Whether ranks learn of a signal to any of them beside the data, at no cost for a step."""
        return self._lifeline is not None

    @property
    def has_shut_down_together(self) -> bool:
        """Whether all ranks have stopped at the same place of the run, by agreement."""
        return self._lifeline is not None and self._lifeline.stops

    @property
    def requeues(self) -> bool:
        """Whether they have stopped because SLURM will start the job again."""
        return self._lifeline is not None and self._lifeline.requeues

    @override
    def teardown(self) -> None:
        liveness.unwatch_signals()  # Lightning puts back the handlers that were there before
        if self.lightning_module is not None:
            forget_signal_handlers(self.lightning_module)
        self._lifeline = None
        super().teardown()
