"""Stops every rank before the same step on a SIGTERM to any, so that callbacks can still save.

    rank 1  SIGTERM ─> handler ─> lifeline ─> hub ─> each rank says how many steps it has begun
    all     step 17   step 18   stop before step 19: SIGTERMException on rank 1,
                                RankFailedError "rank 1 received SIGTERM" on the others

Lightning's own handler broadcasts inside the signal handler, where the other ranks do not answer
unless all get the signal at the same point. Here the ranks agree over the lifeline, beside the data
and at no cost for a step. Ranks that are threads of one process get the signal all at once.
"""

import os
import signal
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_shard.backends import liveness
from lightning_shard.backends.in_process.termination import RanksTermination
from lightning_shard.backends.in_process.world import current_world
from lightning_shard.errors import RankFailedError
from lightning_shard.launchers._lightning import mark_terminated
from lightning_shard.trainer._lightning import forget_sigterm_handler, handle_sigterm


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


class CoordinatedShutdown(ParallelStrategy):
    """Counts the steps of a run, and ends it before the same one on every rank."""

    _lifeline: liveness.Lifeline | RanksTermination | None = None

    def watch_for_termination(self, trainer: "pl.Trainer") -> None:
        """Handle SIGTERM for this run; call before Lightning registers its handlers.

        Earlier handlers, and SLURM's, stay as Lightning composes them.
        """
        world = current_world()
        if world is not None:
            self._lifeline = world.ranks_termination()
            handle_sigterm(trainer, TerminationHandler(world.termination))
            return
        self._lifeline = lifeline = liveness.current()
        if lifeline is not None:
            handle_sigterm(trainer, TerminationHandler(lifeline))
            liveness.watch_signals()

    def begin_step(self) -> None:
        """Begin a step; every rank must call before each of its steps.

        Raises:
            SIGTERMException: This rank was sent SIGTERM, and all ranks stop here.
            RankFailedError: Another rank was sent SIGTERM, or has failed.
        """
        if self._lifeline is None or not self._lifeline.step():
            return
        if self._lifeline.was_terminated:
            if self.lightning_module is not None:
                mark_terminated(self.lightning_module.trainer)
            raise SIGTERMException(liveness.TERMINATED_STATUS)
        raise RankFailedError(
            f"Rank {self.global_rank} of {self.world_size} stopped because rank "
            f"{self._lifeline.terminated_rank} received SIGTERM: somebody ended the job, its "
            f"scheduler for example. All ranks stopped before the same step; the callback "
            f"OnExceptionCheckpoint saves there. Go on from that, or from the last checkpoint."
        )

    @property
    def has_shut_down_together(self) -> bool:
        """Whether all ranks have stopped at the same place of the run, by agreement."""
        return self._lifeline is not None and self._lifeline.stops

    @override
    def teardown(self) -> None:
        liveness.unwatch_signals()  # Lightning puts back the handlers that were there before
        if self.lightning_module is not None:
            forget_sigterm_handler(self.lightning_module)
        self._lifeline = None
        super().teardown()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.begin_step()
        super().on_train_batch_start(batch, batch_idx)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self.begin_step()
        return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self.begin_step()
        return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self.begin_step()
        return super().predict_step(*args, **kwargs)
