"""What the callbacks that write into a run's folder have in common: where, when, and who they are.

Each rank writes its own file, see `reporting.records`: none of these callbacks communicates.
"""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from typing_extensions import override

from lightning_shard.core.reporting.records import RankFile
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.elastic import ElasticStrategy
from lightning_shard.strategies.names import strategy_name
from lightning_shard.strategies.trainer.hook_advice import OnlyLooks


class RunMonitor(OnlyLooks, Callback):
    """Writes records of each rank of a fit into the run's folder.

    A given folder of None is the first logger's, or the Trainer's `default_root_dir`.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._given_folder = folder
        self._folder: Path | None = None
        self._file: RankFile | None = None
        self._has_begun = False
        self._step_before = 0  # when the present batch began

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        strategy = own_strategy(trainer, type(self).__name__)
        if self._given_folder is not None:
            self._folder = Path(self._given_folder)
        elif isinstance(strategy, ElasticStrategy):
            raise ConfigError(
                f"{type(self).__name__} has no folder, and a rank that joins an elastic fit could "
                f"not find that of the others; expected one. Pass folder='runs/1', say."
            )
        else:
            self._folder = Path(trainer.log_dir or trainer.default_root_dir)

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        self._step_before = trainer.global_step
        if not self._has_begun:  # here, not before: who joins an elastic fit has a rank by now
            self._has_begun = True
            strategy = own_strategy(trainer, type(self).__name__)
            self._write(
                trainer, "fit", **_described(trainer, strategy), monitor=type(self).__name__
            )

    def _steps_taken(self, trainer: "pl.Trainer") -> int:
        """Return the number of optimizer steps since the present batch began."""
        return trainer.global_step - self._step_before

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._end(trainer, is_failed=False)
        if self._has_begun:
            self._write(trainer, "end", monitor=type(self).__name__)
        self._close()

    @override
    def on_exception(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException
    ) -> None:
        self._end(trainer, is_failed=True)
        if self._has_begun:
            said = f"{type(exception).__name__}: {exception}"
            self._write(trainer, "failure", monitor=type(self).__name__, error=said[:2000])
        self._close()

    def _end(self, trainer: "pl.Trainer", *, is_failed: bool) -> None:
        """Write what is left of a fit that ends, and forget it."""

    def _write(
        self, trainer: "pl.Trainer", kind: str, step: int | None = None, **figures: Any
    ) -> None:
        """Write a record, of the present step unless another is given."""
        rank = own_strategy(trainer, type(self).__name__).mesh_rank
        if self._file is None or self._file.rank != rank:  # elastic ranks move up
            if self._file is not None:
                self._file.close()
            assert self._folder is not None
            self._file = RankFile(self._folder, rank)
        self._file.append(kind, trainer.global_step if step is None else step, **figures)

    def _log_metrics(self, trainer: "pl.Trainer", metrics: Mapping[str, float]) -> None:
        """Give the loggers what rank 0 has seen."""
        for logger in trainer.loggers if trainer.is_global_zero else ():
            named = {f"monitor/{name}": value for name, value in metrics.items()}
            logger.log_metrics(named, step=trainer.global_step)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._has_begun = None, False


def own_strategy(trainer: "pl.Trainer", monitor: str) -> DataParallelStrategy:
    """Return the Trainer's strategy, if it is one whose counters and engine are known."""
    if not isinstance(trainer.strategy, DataParallelStrategy):
        raise ConfigError(
            f"{monitor} shows what the strategies of this package do, but the Trainer's is "
            f"{type(trainer.strategy).__name__}. Pass a name such as strategy='zero2', or leave "
            f"the callback out."
        )
    return trainer.strategy


def _described(trainer: "pl.Trainer", strategy: DataParallelStrategy) -> dict[str, Any]:
    """Say which run this is, and which rank."""
    mesh, data = strategy.mesh, strategy.data_collectives
    return {
        "strategy": strategy_name(strategy),
        "backend": strategy.backend.name,
        "in_process": strategy.is_in_process,
        "device": strategy.root_device.type,
        "world_size": strategy.mesh_size,
        "mesh": {axis: mesh.size(axis) for axis in mesh.axes},
        "coordinates": mesh.coordinates(strategy.mesh_rank),
        "data_rank": data.rank,
        "data_size": data.size,
        "precision": str(trainer.precision),
        "accumulate": trainer.accumulate_grad_batches,
        "host": platform.node(),
        "process": os.getpid(),
        "torch": str(torch.__version__),
    }
