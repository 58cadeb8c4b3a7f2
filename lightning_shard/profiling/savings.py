"""Shows what a strategy saves: bytes held and sent, and how evenly experts share the tokens.

The table of held bytes is taken inside an optimizer's second step, the first moment at which
parameters, gradients and optimizer state all exist:

    rank          parameters   gradients   optimizer state       total
    0               0.83 MiB    0.83 MiB          1.65 MiB    3.31 MiB
    1               0.83 MiB    0.83 MiB          1.65 MiB    3.31 MiB
    replicated      3.31 MiB    3.31 MiB          6.62 MiB   13.24 MiB
    most / repl.         25%         25%               25%         25%
"""

import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from rich.table import Table
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.core.options import AtLeastOne, checked_options
from lightning_shard.core.reporting.output import format_bytes, plain_text
from lightning_shard.data_parallel.held_bytes import HeldBytes
from lightning_shard.errors import ConfigError
from lightning_shard.expert_parallel.load import ExpertLoad
from lightning_shard.profiling.run_monitor import RunMonitor, own_strategy
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.memory_notes import memory_kinds
from lightning_shard.strategies.model_parallel import HybridParallelStrategy
from lightning_shard.strategies.trainer.hook_advice import OnlyLooks

_UNIT_OF_PEAK = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, as its manuals say


class HeldBytesTable(OnlyLooks, Callback):
    """Print, once per fit and on rank zero, the bytes that each rank holds.

    Every rank must have this callback, since the figures are gathered over all of them.

    Raises:
        ConfigError: The Trainer's strategy is not one of this package's; raised at set-up.
    """

    def __init__(self) -> None:
        self._stepped_optimizers: set[Optimizer] = set()
        self._is_printed = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        own_strategy(trainer, self)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stepped_optimizers.clear()
        self._is_printed = False

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if self._is_printed:
            return
        if optimizer not in self._stepped_optimizers:
            self._stepped_optimizers.add(optimizer)
            return
        strategy = own_strategy(trainer, self)
        held = strategy.collectives.all_gather_object(strategy.held_bytes())
        pl_module.print(render_held_bytes(held, strategy.replicated_bytes()))
        self._is_printed = True

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_printed:
            rank_zero_warn(
                "HeldBytesTable printed nothing: it counts in an optimizer's second step, and this "
                "run ended before one."
            )


def render_held_bytes(held: list[HeldBytes], replicated: HeldBytes) -> str:
    """Lay the figures out as a table in plain text, a row for each rank in order."""
    table = Table("rank", title="Bytes held by each rank")
    for heading in ("parameters", "gradients", "optimizer state", "total"):
        table.add_column(heading, justify="right")
    for rank, rank_held in enumerate(held):
        table.add_row(str(rank), *map(format_bytes, _columns(rank_held)))
    table.add_section()
    table.add_row("replicated", *map(format_bytes, _columns(replicated)))
    most = [max(column) for column in zip(*map(_columns, held), strict=True)]
    shares = [_share(*pair) for pair in zip(most, _columns(replicated), strict=True)]
    table.add_row("most / replicated", *shares)
    return plain_text(table, width=100)


def _columns(held: HeldBytes) -> tuple[int, int, int, int]:
    return held.parameters, held.gradients, held.optimizer_state, held.total


def _share(num_bytes: int, replicated_bytes: int) -> str:
    return f"{num_bytes / replicated_bytes:.1%}" if replicated_bytes else "-"


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
    def __init__(self, folder: str | Path | None = None, every_n_steps: AtLeastOne = 10) -> None:
        super().__init__(folder)
        self._every_n_steps = every_n_steps
        self._num_updates = 0

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._num_updates = 0

    @override
    def on_before_optimizer_step(self, trainer: "pl.Trainer", *_: Any, **__: Any) -> None:
        number, self._num_updates = self._num_updates, self._num_updates + 1
        if number % self._every_n_steps != 1 % self._every_n_steps:
            return
        strategy = own_strategy(trainer, self)
        kinds = memory_kinds(strategy)
        held = {name: value for name, value in vars(kinds).items() if value is not None}
        held["besides"] = max(strategy.held_bytes().total - kinds.known, 0)
        self._write(trainer, "memory", held=held, **_peak(strategy.root_device))
        self._log_metrics(trainer, {f"memory/{name}": value for name, value in held.items()})


def _peak(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return {"peak": torch.cuda.max_memory_allocated(device), "peak_of": "device"}
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak": pages * _UNIT_OF_PEAK, "peak_of": "process"}


class CompressionRatio(Callback):
    """Log the bytes that dense steps would have sent over those that were sent, in this fit.

    Everything that a step sends counts: under "zero1" and "zero2" parameters travel in their own
    format, which keeps the ratio below 2 where they are in float32 and gradients are sent once in a
    step, and a dense warm-up shows for a while.

    Args:
        name: Name of the metric, which loggers get, too.

    Raises:
        ConfigError: The strategy does not compress; raised at the start of training.
    """

    @checked_options
    def __init__(self, name: str = "compression") -> None:
        self.name = name

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, DataParallelStrategy) or strategy.compression is None:
            raise ConfigError(
                f"CompressionRatio shows what compression saves, but {type(strategy).__name__} "
                f"compresses nothing here. Pass strategy=ZeRO2Strategy(compression='int8') or the "
                f"like, or leave the callback out."
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(trainer.strategy, DataParallelStrategy)
        ratio = trainer.strategy.compression_tally().ratio
        pl_module.log(self.name, ratio, prog_bar=True, rank_zero_only=True)


class ExpertBalance(Callback):
    """Log the busiest expert's tokens over the mean, of the mixture where it is worst.

    It is 1 where all experts have the same, and the number of experts where one has all; a step
    takes as long as the busiest rank's. Beside it, `<name>/sent_away` is the share of tokens that
    went to an expert of another rank. Both are of the steps since they were logged last.

    Args:
        every_n_steps: Batches between two values, each of which takes an exchange of the counters.
        name: Name of the first metric, which loggers get, too; the second's begins with it.

    Raises:
        ConfigError: The strategy does not share experts; raised at the start of training.
    """

    @checked_options
    def __init__(self, every_n_steps: AtLeastOne = 50, name: str = "expert_imbalance") -> None:
        self.every_n_steps, self.name = every_n_steps, name
        self._before: Mapping[str, ExpertLoad] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, HybridParallelStrategy) or strategy.mesh.ep == 1:
            raise ConfigError(
                f"ExpertBalance shows how ranks share tokens out to experts, but "
                f"{type(strategy).__name__} shares no experts here. Pass "
                f"strategy=HybridParallelStrategy(expert_parallel_size=2) or the like, or leave "
                f"the callback out."
            )
        self._before = {}

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.every_n_steps:
            return
        assert isinstance(trainer.strategy, HybridParallelStrategy)
        now = trainer.strategy.expert_load()
        loads = [one.since(self._before.get(name)) for name, one in now.items()]
        self._before = now
        worst = max(loads, key=lambda one: one.imbalance)
        pl_module.log(self.name, worst.imbalance, prog_bar=True, rank_zero_only=True)
        num_tokens = max(sum(sum(one.tokens) for one in loads), 1)
        away = sum(one.num_sent_away for one in loads) / num_tokens
        pl_module.log(f"{self.name}/sent_away", away, rank_zero_only=True)
