"""Writes what ranks send in a step, by axis and operation, and what a dry run says of it."""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from lightning_shard.errors import ConfigError
from lightning_shard.option_checks import checked_options
from lightning_shard.planning.report import DryRun
from lightning_shard.profiling.axis_counters import AxisCounters, AxisTraffic, add_to
from lightning_shard.profiling.expectations import Expectations
from lightning_shard.profiling.run_monitor import RunMonitor, own_strategy
from lightning_shard.strategies.local_updates import LocalUpdates


class TrafficMonitor(RunMonitor):
    """Write what each rank sends from the beginning of a batch to its end, into the run's folder.

    Bytes are those of a ring, as everywhere in this package. Before the first step rank 0 takes the
    strategy's dry run on a copy of the module without elements, and writes what it says. Loggers
    get rank 0's bytes of a step as `monitor/sent_bytes/dp` and so on.

    Args:
        folder: Folder of the run; None takes the first logger's, or the Trainer's
            `default_root_dir` without loggers.
        every_n_steps: Number of optimizer steps that are counted together.
        dry_run: Whether to take the dry run, which needs a `training_step` that asks for the
            shapes of tensors only.

    Raises:
        ConfigError: A number below 1; at set-up, another package's strategy, or an elastic one
            without a folder.
    """

    @checked_options
    def __init__(
        self, folder: str | Path | None = None, every_n_steps: int = 10, dry_run: bool = True
    ) -> None:
        super().__init__(folder)
        if every_n_steps < 1:
            raise ConfigError(f"every_n_steps must be at least 1, got {every_n_steps}.")
        self._every_n_steps, self._takes_dry_run = every_n_steps, dry_run
        self._forget()

    def _forget(self) -> None:
        self._counters: AxisCounters | None = None
        self._expectations: Expectations | None = None
        self._sent: AxisTraffic = {}  # since the last record
        self._num_batches = self._num_steps = 0  # since the last record
        self._num_steps_before = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self._takes_dry_run and trainer.is_global_zero:
            strategy = own_strategy(trainer, type(self).__name__)
            self._expectations = Expectations(pl_module, strategy, str(trainer.precision))

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        expectations, self._expectations = self._expectations, None
        if expectations is not None and trainer.is_global_zero:
            self._note_dry_run(trainer, expectations, batch)
        if self._counters is None:
            self._counters = AxisCounters(own_strategy(trainer, type(self).__name__))
        self._counters.look()
        self._counters.since()  # what lies between two batches: validation, checkpoints

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._counters is not None
        add_to(self._sent, self._counters.since())
        self._num_batches += 1
        steps = self._steps_taken(trainer)
        if steps < 1:  # gradients add up
            return
        self._num_steps += steps
        taken = self._num_steps_before + self._num_steps
        is_first = not self._num_steps_before  # in the first step ranks agree what to send
        if is_first or taken // self._every_n_steps > self._num_steps_before // self._every_n_steps:
            self._note_sent(trainer)

    @override
    def _end(self, trainer: Trainer, *, is_failed: bool) -> None:
        if not is_failed:
            self._note_sent(trainer)
        self._forget()

    def _note_sent(self, trainer: Trainer) -> None:
        steps = self._num_steps
        if not steps:
            return
        axes = {
            axis: {
                name: {
                    "calls": one.calls,
                    "bytes": one.bytes,
                    "seconds": one.seconds,
                    "waited": one.seconds_waited,
                }
                for name, one in operations.items()
            }
            for axis, operations in self._sent.items()
        }
        self._write(trainer, "traffic", steps=steps, batches=self._num_batches, axes=axes)
        sent = {
            f"sent_bytes/{axis}": sum(one.bytes for one in operations.values()) / steps
            for axis, operations in self._sent.items()
        }
        self._log_metrics(trainer, sent)
        self._num_steps_before += steps
        self._sent, self._num_batches, self._num_steps = {}, 0, 0

    def _note_dry_run(self, trainer: Trainer, expectations: Expectations, batch: Any) -> None:
        found = expectations.dry_run(batch)
        ranks = [] if found is None else _rows(found)
        besides = [] if found is None else list(found.not_counted)
        obstacle = expectations.obstacles.get("dry run")
        self._write(
            trainer,
            "dry_run",
            ranks=ranks,
            not_counted=besides,
            every_step=not isinstance(trainer.strategy, LocalUpdates),
            obstacle=obstacle,
        )


def _rows(found: DryRun) -> list[dict[str, Any]]:
    """Return what each rank of the pipeline holds and sends."""
    return [
        {
            "stages": list(one.stages),
            "memory": vars(one.memory),
            "sent": dict(one.sent),
            "idle_share": one.idle_share,
        }
        for one in found.ranks
    ]
