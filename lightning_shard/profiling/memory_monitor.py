"""Writes what ranks hold of each kind when the optimizer steps: the callback `MemoryMonitor`."""

import resource
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.errors import ConfigError
from lightning_shard.option_checks import checked_options
from lightning_shard.profiling.run_monitor import RunMonitor, own_strategy

_UNIT_OF_PEAK = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, as its manuals say


class MemoryMonitor(RunMonitor):
    """Write the bytes that each rank holds, by kind, into the run's folder.

    They are counted by storage when gradients are complete and the optimizer is about to step: in
    the second step, the first that has optimizer state, and every n steps of optimizers. On CUDA
    the peak of the device's allocator comes with them; on CPUs that of the process, which ranks of
    one process share. Loggers get rank 0's as `monitor/memory/...`.

    Args:
        folder: Folder of the run; None takes the first logger's, or the Trainer's
            `default_root_dir` without loggers.
        every_n_steps: Number of optimizer steps from one count to the next.

    Raises:
        ConfigError: A number below 1; at set-up, another package's strategy, or an elastic one
            without a folder.
    """

    @checked_options
    def __init__(self, folder: str | Path | None = None, every_n_steps: int = 10) -> None:
        super().__init__(folder)
        if every_n_steps < 1:
            raise ConfigError(f"every_n_steps must be at least 1, got {every_n_steps}.")
        self._every_n_steps = every_n_steps
        self._num_updates = 0

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._num_updates = 0

    @override
    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer
    ) -> None:
        number, self._num_updates = self._num_updates, self._num_updates + 1
        if number % self._every_n_steps != 1 % self._every_n_steps:
            return
        strategy = own_strategy(trainer, type(self).__name__)
        kinds = strategy.memory_kinds()
        held = {name: value for name, value in vars(kinds).items() if value is not None}
        held["besides"] = max(strategy.held_bytes().total - kinds.known, 0)
        self._write(trainer, "memory", held=held, **_peak(strategy.root_device))
        self._log_metrics(trainer, {f"memory/{name}": value for name, value in held.items()})


def _peak(device: torch.device) -> dict[str, Any]:
    """Return the most bytes that were there so far, and of what."""
    if device.type == "cuda":
        return {"peak": torch.cuda.max_memory_allocated(device), "peak_of": "device"}
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak": pages * _UNIT_OF_PEAK, "peak_of": "process"}
