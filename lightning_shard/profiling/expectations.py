"""What a run is expected to take, found on a copy of its module without elements.

    setup           the module is full: rank 0 copies its shapes
    first batch     its shapes are known: the copy takes a step, see `planning`

A copy takes no memory and no arithmetic, and other ranks are not asked.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_shard.checkpoint.random_state import load_random_state, random_state
from lightning_shard.planning.dry_run import flops_of_batch
from lightning_shard.planning.report import DryRun
from lightning_shard.planning.simulated_model import NoElements
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.trainer._lightning import runners_of


class Expectations:
    """What one rank finds out about a run before its first step.

    Args:
        module: The module of the run, full, in the callbacks' `setup`.
        strategy: The Trainer's strategy.
        precision: As for the Trainer.

    Attributes:
        obstacles: Why something could not be found, by what it is.
    """

    def __init__(
        self, module: "pl.LightningModule", strategy: DataParallelStrategy, precision: str
    ) -> None:
        self.obstacles: dict[str, str] = {}
        self._strategy, self._precision = strategy, precision
        self._module: Any = self._unless_it_fails(
            "copy", lambda: NoElements().module(module, left_out=runners_of(module))
        )

    def flops(self, batch: Any) -> int | None:
        """Return the operations of a batch in forward and backward; None where it cannot run."""
        found: int | None = self._found(
            "flops", lambda: flops_of_batch(self._module, _shapes(batch), self._precision)
        )
        return found

    def dry_run(self, batch: Any) -> DryRun | None:
        """Return the strategy's dry run with a batch; None where it cannot run."""
        found: DryRun | None = self._found(
            "dry run",
            lambda: self._strategy.dry_run(
                self._module,
                _shapes(batch),
                world_size=self._strategy.mesh_size,
                precision=self._precision,
            ),
        )
        return found

    def _found(self, what: str, find: Any) -> Any:
        if self._module is None:
            self.obstacles[what] = self.obstacles["copy"]
            return None
        streams = random_state(self._strategy.root_device)
        try:
            return self._unless_it_fails(what, find)
        finally:
            load_random_state(streams, self._strategy.root_device)

    def _unless_it_fails(self, what: str, find: Any) -> Any:
        """Return what is found; a monitored run must not end because a step asks for elements."""
        try:
            return find()
        except Exception as error:
            self.obstacles[what] = f"{type(error).__name__}: {error}"
            return None


def _shapes(batch: Any) -> Any:
    """Return a batch without elements."""
    return apply_to_collection(
        batch, Tensor, lambda one: torch.empty_like(one, device="meta") if one.ndim else one.cpu()
    )
