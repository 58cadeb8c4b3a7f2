"""What the callbacks that write into a run's folder have in common: where, when, and who they are.

Each rank writes its own file, see `reporting.records`: none communicates but `PlanMonitor`, which
reads all of them when a fit ends.
"""

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info
from rich import box
from rich.table import Table
from typing_extensions import override

from lightning_shard.core.options import checked_options
from lightning_shard.core.reporting.figures_of_run import chosen_of
from lightning_shard.core.reporting.output import plain_text
from lightning_shard.core.reporting.plan_deviation import Deviation, deviations, why_of_another_run
from lightning_shard.core.reporting.records import PLAN, RankFile, read_run
from lightning_shard.errors import ConfigError
from lightning_shard.planning.plan import Plan
from lightning_shard.strategies.data_parallel import DataParallelStrategy
from lightning_shard.strategies.elastic import ElasticStrategy
from lightning_shard.strategies.names import strategy_name
from lightning_shard.strategies.trainer.hook_advice import OnlyLooks


class RunMonitor(OnlyLooks, Callback):
    """Writes records of each rank into the run's folder: the given one, or where loggers write."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self._given_folder = folder
        self._folder: Path | None = None
        self._file: RankFile | None = None
        self._has_begun = False
        self._step_before = 0  # when the present batch began

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        strategy = own_strategy(trainer, self)
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
    def on_train_batch_start(self, trainer: "pl.Trainer", *_: Any, **__: Any) -> None:
        self._step_before = trainer.global_step
        if not self._has_begun:  # here, not before: who joins an elastic fit has a rank by now
            self._has_begun = True
            described = _described(trainer, own_strategy(trainer, self))
            self._write(trainer, "fit", **described, monitor=type(self).__name__)

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
        rank = own_strategy(trainer, self).mesh_rank
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


def own_strategy(trainer: "pl.Trainer", monitor: Callback) -> DataParallelStrategy:
    """Return the Trainer's strategy, if it is one whose counters and engine are known."""
    if not isinstance(trainer.strategy, DataParallelStrategy):
        raise ConfigError(
            f"{type(monitor).__name__} shows what the strategies of this package do, but the "
            f"Trainer's is {type(trainer.strategy).__name__}. Pass a name such as "
            f"strategy='zero2', or leave the callback out."
        )
    return trainer.strategy


def _described(trainer: "pl.Trainer", strategy: DataParallelStrategy) -> dict[str, Any]:
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


DEVIATION = "plan_deviation.json"
"""The deviations at the end of a fit, in its folder."""


class PlanMonitor(RunMonitor):
    """Hold a plan to account: store it with the run, and report at the end how far off it was.

    Rank 0 writes `plan.json` when the fit begins. At the end the ranks meet once, and rank 0 prints
    what `MemoryMonitor`, `TrafficMonitor` and `StepMonitor` have written into the same folder
    beside what was planned, and writes it as `plan_deviation.json`. The report of the run has the
    same table.

    Args:
        plan: What was planned: what `lightning_shard.plan` returns, or the file that
            `lightning-shard plan --json` was written to. None takes that of `shard_auto`.
        folder: Folder of the run; None takes the first logger's, or the Trainer's
            `default_root_dir` without loggers.

    Raises:
        ConfigError: The plan cannot be read or recommends nothing. At set-up, another package's
            strategy, or an elastic one; when the fit begins, there is no plan.
    """

    @checked_options
    def __init__(
        self, plan: Plan | str | Path | None = None, folder: str | Path | None = None
    ) -> None:
        super().__init__(folder)
        self._given_plan = None if plan is None else _read(plan)
        self._has_trained = False

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if isinstance(own_strategy(trainer, self), ElasticStrategy):
            raise ConfigError(
                "PlanMonitor compares a run with a plan of a fixed number of ranks, but the "
                "Trainer's strategy is elastic. Leave the callback out; the report of the run "
                "shows memory and traffic of each generation."
            )
        super().setup(trainer, pl_module, stage)

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        plan = self._given_plan or getattr(trainer.strategy, "prediction", None)
        if plan is None:
            raise ConfigError(
                f"PlanMonitor has no plan of this run, expected one with "
                f"{type(trainer.strategy).__name__}. Pass PlanMonitor(plan=...), what "
                f"lightning_shard.plan returns or `lightning-shard plan --json` prints, or train "
                f"with strategy='shard_auto', which plans."
            )
        if trainer.is_global_zero:
            assert self._folder is not None
            self._folder.mkdir(parents=True, exist_ok=True)
            written = json.dumps(plan, indent=2)
            Path(self._folder, PLAN).write_text(written, encoding="utf-8")

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._has_trained = True

    @override
    def on_fit_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        trainer.strategy.barrier("plan monitor")  # by now each rank's monitors have closed files
        if trainer.is_global_zero and self._has_trained:
            assert self._folder is not None
            self._report(self._folder)

    def _report(self, folder: Path) -> None:
        run = read_run(folder)
        rows, besides = deviations(run), why_of_another_run(run)
        told = {"rows": [one.to_dict() for one in rows], "besides": besides}
        Path(folder, DEVIATION).write_text(json.dumps(told, indent=2), encoding="utf-8")
        rank_zero_info("\n".join(part for part in (_text(rows), besides) if part))


def _read(plan: Plan | str | Path) -> Mapping[str, Any]:
    found: Any = None
    if isinstance(plan, Plan):
        found = plan.to_dict()
    elif not isinstance(plan, str | Path):
        raise ConfigError(
            f"PlanMonitor(plan={plan!r}) is {type(plan).__name__}, expected a Plan or the path of "
            f"a file. Pass what lightning_shard.plan returns or `lightning-shard plan --json` "
            f"prints."
        )
    else:
        try:
            found = json.loads(Path(plan).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"PlanMonitor(plan={str(plan)!r}) cannot be read ({error}), expected a plan as "
                f"`lightning-shard plan --json` prints it. Write it anew."
            ) from error
    if not isinstance(found, dict) or chosen_of(found) is None:
        raise ConfigError(
            "PlanMonitor was given a plan that recommends nothing, so that nothing can be "
            "compared; expected one in which a candidate fits. Plan for more devices or memory."
        )
    return found


def _text(rows: list[Deviation]) -> str:
    table = Table(title="The plan and the run", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "planned", "measured", "deviation"):
        table.add_column(name, justify="left" if not name else "right")
    for one in rows:
        table.add_row(*one.cells)
    return plain_text(table, width=120)
