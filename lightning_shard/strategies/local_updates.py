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
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from typing_extensions import override

from lightning_shard.errors import ConfigError
from lightning_shard.strategies.parts import SchemeHooks
from lightning_shard.strategies.trainer import _lightning


class LocalUpdates(SchemeHooks):
    """Says in a fit's loops when ranks meet, and stops them together at SIGTERM."""

    may_have_all = False  # ranks have weights of their own

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self._in_loops = ExitStack()  # what is put into the loops of a fit

    @override
    def begin_fit(self, trainer: "pl.Trainer") -> None:
        enter = self._in_loops.enter_context
        enter(_lightning.without_sigterm_broadcast(trainer))
        enter(_lightning.after_optimizer_steps(trainer, self.end_step))
        enter(_lightning.around_validation(trainer, self.in_agreement))
        enter(_lightning.after_training_epochs(trainer, self.end_epoch))
        enter(_lightning.after_training_epochs(trainer, self.run.checkpoints.saves.advance))

    def refuse(self, trainer: "pl.Trainer", syncs: str, averages: str) -> None:
        """Refuse what has ranks compute together, saying what that means here and what to do."""
        if _lightning.layer_sync(self.strategy) is not None:
            raise ConfigError(
                f"sync_batchnorm=True makes ranks wait for each other in every forward, but under "
                f"{syncs}"
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
                raise ConfigError(f"{type(callback).__name__} would average {averages}")

    @override
    @abstractmethod
    def in_agreement(self) -> AbstractContextManager[None]:
        """Let ranks hold the same inside; each must enter after the same number of steps."""

    @abstractmethod
    def end_step(self) -> None:
        """Exchange what it is time for; automatic optimization has counted one more step."""

    def end_epoch(self) -> None:
        """Meet after the last batch of an epoch, or after the one that cut it short."""

    @override
    def end_run(self) -> None:
        self._in_loops.close()
