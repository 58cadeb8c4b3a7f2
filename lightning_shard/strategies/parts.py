"""A part of a run, and what a scheme adds to the parts.

A strategy has one `Run` (`run.py`), and each idea of it is a part, which knows the others by the
run. What one scheme does besides stands in its `SchemeHooks`, not in overridden methods.

Ranks that train by themselves under a Trainer: nothing but the strategy makes them meet.

    a batch           Lightning's loop broadcasts whether rank 0 got SIGTERM: left out here
    a step            ranks may exchange something after it, also where user code has left it out
    a validation      ranks agree before the first hook of it, and part after the last one
    an epoch's end    ranks may agree before the hooks of it, however the epoch has ended
    a fit's end       ranks hold the same before the hooks `on_train_end`

Hooks of callbacks and of the module come before the strategy's own. One that swaps weights for a
validation would otherwise swap what ranks have not agreed on yet, and training would go on from it.
"""

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from typing_extensions import override

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.compression import Tally
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.dimensions.dimension import RunGroups
from lightning_shard.strategies.trainer import _lightning
from lightning_shard.strategies.trainer.same_on_ranks import SettingsOfSteps

_OWN_KINDS = (Collectives, DataGroups, RunGroups, dist.ProcessGroup, SettingsOfSteps)


class RunPart:
    """One idea of a strategy's runs, which knows the strategy and the other parts by the run."""

    def __init__(self, run: Any) -> None:
        self.run = run

    @property
    def strategy(self) -> Any:
        """The strategy, to which Lightning gives module, optimizers, plugins and devices."""
        return self.run.strategy

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the groups of this process."""
        return {
            name: None if isinstance(value, _OWN_KINDS) else value
            for name, value in vars(self).items()
        }


class SchemeHooks(RunPart):
    """What a scheme does besides, by an engine of `engine_type`; here it does nothing."""

    engine_type = DataParallelEngine
    may_have_all = True

    def compares_start(self) -> bool:
        """Whether ranks compare what they were started with."""
        return True

    def chooses_groups(self) -> bool:
        """Whether it is still to be known which groups there are."""
        return False

    def make_groups(self) -> None:
        """Make groups of its own; each rank must call."""

    def forget_groups(self) -> None:
        """Refer to none of them any more."""

    def begin_run(self, trainer: "pl.Trainer") -> None:
        """Refuse what cannot be in a fit, before anything is changed."""

    def begin_fit(self, trainer: "pl.Trainer") -> None:
        """Take part in a fit's loops, once the fit is set up."""

    def begin_training(self) -> None:
        """Go on from what was loaded, in a fit that is about to take its first step."""

    def stop_together(self) -> None:
        """Agree where a signal has stopped all ranks at the same step, and callbacks may save."""

    def end_run(self) -> None:
        """Leave the loops as they were, whether the run has failed or not."""

    def end_steps(self) -> None:
        """Meet for good after the last step of a fit; each rank must call."""

    def in_agreement(self) -> AbstractContextManager[None]:
        """Make the context in which ranks hold the same weights; each rank must enter."""
        return nullcontext()

    def num_micro_batches(self) -> int | None:
        """Return how many micro-batches of a step count, of ranks that may have more; None: all."""
        return None

    def kept_besides(self) -> Mapping[str, Any]:
        """Return what this rank keeps for checkpoints; no communication, and no copies."""
        return {}

    def section(self) -> Mapping[str, Any]:
        """Return what a fit's checkpoint has in the package's section, the same on all ranks."""
        return {}

    def computed_in(self, precision: str) -> str:
        """Return the precision in which parameters are kept and averaged."""
        return precision

    def tally_of_codecs(self) -> Tally:
        """Return the bytes that codecs have sent, and would have sent dense."""
        exchanges = [] if self.run.engine is None else self.run.engine.exchanges
        return sum((exchange.tally for exchange in exchanges), Tally())


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
