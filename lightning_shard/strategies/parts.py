"""A part of a run, and what a scheme adds to the parts.

A strategy has one `Run` (`run.py`), and each idea of it is a part, which knows the others by the
run. What one scheme does besides stands in its `SchemeHooks`, not in overridden methods.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.compression import Tally
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.strategies.dimensions.dimension import RunGroups
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
