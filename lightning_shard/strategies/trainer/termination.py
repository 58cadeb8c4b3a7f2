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
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_shard.backends import liveness
from lightning_shard.backends.in_process.world import RanksTermination, current_world
from lightning_shard.backends.liveness.lifeline import Lifeline
from lightning_shard.backends.liveness.thread import (
    TERMINATED_STATUS,
    RepeatedSignal,
    Requeueable,
    Terminable,
)
from lightning_shard.environments.launchers._lightning import mark_terminated
from lightning_shard.errors import RankFailedError
from lightning_shard.strategies.trainer._lightning import (
    forget_signal_handlers,
    handle_requeue,
    handle_sigterm,
    requeue_signal,
)


class TerminationHandler:
    """Handles SIGTERM: tells the other ranks, and ends the process when the signal comes again."""

    def __init__(self, lifeline: Terminable) -> None:
        self._lifeline = lifeline
        self._process = os.getpid()
        self._sigterms = RepeatedSignal()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if os.getpid() != self._process:  # a forked child, which is no rank
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        self._sigterms.come(self._lifeline)


class RequeueHandler:
    """Handles SLURM's signal before it requeues the job: tells the other ranks."""

    def __init__(self, lifeline: Requeueable) -> None:
        self._lifeline = lifeline
        self._process = os.getpid()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal, which a forked child that is no rank passes over."""
        if os.getpid() == self._process:
            self._lifeline.announce_requeue()


class RunTermination:
    """How a signal to any rank ends the runs of one strategy."""

    lifeline: Lifeline | RanksTermination | None = None

    def __init__(self, *, saves: bool) -> None:
        self._saves = saves

    def __getstate__(self) -> dict[str, Any]:
        """Leave out who watches over this process."""
        return {**vars(self), "lifeline": None}

    @property
    def has_stopped_all(self) -> bool:
        """Whether all ranks have stopped at the same place of the run, by agreement."""
        return self.lifeline is not None and self.lifeline.stops

    @property
    def requeues(self) -> bool:
        """Whether they have stopped because SLURM will start the job again."""
        return self.lifeline is not None and self.lifeline.requeues

    @property
    def saves_on_sigterm(self) -> bool:
        """Whether a fit that SIGTERM ends is saved though no callback does so."""
        return self._saves and not self.requeues

    def settle(self, strategy: Any) -> None:
        """Find out why all ranks have stopped, where not each knows it; each must call."""

    def watch(self, trainer: "pl.Trainer") -> None:
        """Handle signals for a run; call before Lightning registers its own handlers."""
        world = current_world()
        if world is not None:
            handle_sigterm(trainer, TerminationHandler(world.termination))
            handle_requeue(trainer, RequeueHandler(world.termination))
            self.lifeline = world.ranks_termination()
            return
        self.lifeline = lifeline = liveness.current()
        if lifeline is not None:
            lifeline.requeue_signal = requeue_signal(trainer)
            handle_sigterm(trainer, TerminationHandler(lifeline))
            handle_requeue(trainer, RequeueHandler(lifeline))
            liveness.watch_signals()

    def begin_step(
        self, trainer: "pl.Trainer | None", environment: ClusterEnvironment | None
    ) -> None:
        """Begin a step, or raise after a signal to any rank; every rank must call."""
        lifeline = self.lifeline
        if lifeline is None or not lifeline.step():
            return
        if lifeline.was_terminated or lifeline.requeues:
            if trainer is not None:
                mark_terminated(trainer)
            raise SIGTERMException(TERMINATED_STATUS)
        assert environment is not None
        rank, size = environment.global_rank(), environment.world_size()
        raise RankFailedError(
            f"Rank {rank} of {size} stopped because rank {lifeline.terminated_rank} received "
            f"SIGTERM: somebody ended the job, its scheduler for example. All ranks stopped before "
            f"the same step. Go on from what is saved there (ckpt_path='last'), or from the last "
            f"checkpoint."
        )

    def end(self, module: "pl.LightningModule | None") -> None:
        """Handle no signals any more; Lightning puts back the handlers that were there before."""
        liveness.unwatch_signals()
        if module is not None:
            forget_signal_handlers(module)
        self.lifeline = None
