"""Ranks that train by themselves under a Trainer: nothing but the strategy makes them meet.

    a batch           Lightning's loop broadcasts whether rank 0 got SIGTERM: left out here
    a step            ranks may exchange something after it, also where user code has left it out
    a validation      ranks agree before the first hook of it, and part after the last one
    an epoch's end    ranks may agree before the hooks of it, however the epoch has ended
    a fit's end       ranks hold the same before the hooks `on_train_end`

Hooks of callbacks and of the module come before the strategy's own. One that swaps weights for a
validation would otherwise swap what ranks have not agreed on yet, and training would go on from it.
"""

from abc import abstractmethod
from contextlib import AbstractContextManager, ExitStack

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.trainer._lightning import (
    after_optimizer_steps,
    after_training_epochs,
    around_validation,
    without_sigterm_broadcast,
)


class LocalUpdates(DataParallelStrategy):
    """Says in a fit's loops when ranks meet.

    SIGTERM stops ranks over the lifeline, see `termination`. Within one process there is none:
    rank 0 gets the signal, raises after its step, and its failure ends the others.
    """

    keeps_optimizers = True
    lays_out_anew = False
    meets_at_steps = False
    _in_loops: ExitStack | None = None  # what is put into the loops of a fit

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._in_loops = ExitStack()
            self._in_loops.enter_context(without_sigterm_broadcast(trainer))
            self._in_loops.enter_context(after_optimizer_steps(trainer, self._end_step))
            self._in_loops.enter_context(around_validation(trainer, self._consensus))
            self._in_loops.enter_context(after_training_epochs(trainer, self._end_epoch))
            self._in_loops.enter_context(after_training_epochs(trainer, self._saves.advance))

    @override
    def _end_steps(self) -> None:
        super()._end_steps()
        self._end_training()

    @abstractmethod
    def _consensus(self) -> AbstractContextManager[None]:
        """Let ranks hold the same inside; each must enter after the same number of steps."""

    @abstractmethod
    def _end_step(self) -> None:
        """Exchange what it is time for; automatic optimization has counted one more step."""

    def _end_epoch(self) -> None:
        """Meet after the last batch of an epoch, or after the one that cut it short."""

    def _end_training(self) -> None:
        """Meet for good: nothing is trained any more."""

    @property
    @override
    def _has_all(self) -> bool:
        return self._engine is None and super()._has_all  # else ranks have weights of their own

    @override
    def teardown(self) -> None:
        if self._in_loops is not None:
            self._in_loops.close()
            self._in_loops = None
        super().teardown()
