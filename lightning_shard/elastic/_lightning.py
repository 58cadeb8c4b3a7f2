"""The private names of Lightning that elastic training touches.

Checked with lightning 2.6; `tests/elastic/test_lightning.py` fails when one changes.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning
import lightning.pytorch as pl
from lightning.fabric.utilities.seed import _collect_rng_states as random_states
from lightning.fabric.utilities.seed import _set_rng_states as set_random_states
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.fit_loop import _FitLoop as FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage

from lightning_shard.errors import ConfigError

__all__ = [
    "FitLoop",
    "TrainingEpochLoop",
    "begin_anew",
    "continue_logs",
    "epoch_of_samplers",
    "handle_sigterm",
    "load_checkpoint",
    "load_trainer_state",
    "measure_epoch",
    "newest_checkpoint",
    "random_states",
    "set_random_states",
    "share_places",
    "trainer_state",
]


def trainer_state(trainer: "pl.Trainer") -> dict[str, Any]:
    """What a checkpoint holds beside the model and the optimizers, of a trainer that fits."""
    state: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning.__version__,
        "loops": {"fit_loop": trainer.fit_loop.state_dict()},
        "lr_schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
        "callbacks": call._call_callbacks_state_dict(trainer),
        "state_dict": {},
    }
    plugin = trainer.precision_plugin
    if plugin_state := plugin.state_dict():
        state[type(plugin).__qualname__] = plugin_state
    plugin.on_save_checkpoint(state)
    if trainer.datamodule is not None:  # type: ignore[attr-defined]
        data = call._call_lightning_datamodule_hook(trainer, "state_dict")
        if data:
            state[type(trainer.datamodule).__qualname__] = data  # type: ignore[attr-defined]
    call._call_callbacks_on_save_checkpoint(trainer, state)
    call._call_lightning_module_hook(trainer, "on_save_checkpoint", state)
    return state


def load_trainer_state(trainer: "pl.Trainer", state: dict[str, Any]) -> None:
    """Load what `trainer_state` has returned on this rank or another; no communication."""
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = state
    try:
        connector.restore_datamodule()
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", state)
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        trainer.fit_loop.load_state_dict(state["loops"]["fit_loop"])
        connector.restore_lr_schedulers()
    finally:
        connector._loaded_checkpoint = {}


def begin_anew(trainer: "pl.Trainer", *, mid_epoch: bool) -> None:
    """Leave whatever hook, stage or data the trainer was in, and ask for the data anew.

    Args:
        trainer: In its fit.
        mid_epoch: Whether batches of the epoch have been trained on.
    """
    loop = trainer.fit_loop
    val_loop = loop.epoch_loop.val_loop
    if trainer.validating and trainer.lightning_module is not None:
        val_loop._module_mode.restore(trainer.lightning_module)
    trainer.training = True
    val_loop._has_run = False
    trainer.lightning_module._current_fx_name = None
    trainer._logger_connector._current_fx = None
    trainer._logger_connector._first_loop_iter = False if mid_epoch else None
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
    loop._combined_loader = None
    loop.setup_data()
    if val_loop._combined_loader is not None:
        val_loop._combined_loader = None
        val_loop.batch_progress.reset_on_run()


def share_places(trainer: "pl.Trainer", broadcast: Callable[[Any], Any]) -> None:
    """Have every rank log and save where rank 0 does, should it come to be rank 0 itself.

    Args:
        trainer: In its fit; each rank must call.
        broadcast: Rank 0's value to all.
    """
    savers = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    mine: tuple[list[Any], list[Any]] = ([], [])
    if trainer.is_global_zero:
        mine = [one.version for one in trainer.loggers], [one.dirpath for one in savers]
    versions, folders = broadcast(mine)
    for logger, version in zip(trainer.loggers, versions, strict=True):
        if "_version" in vars(logger):
            vars(logger)["_version"] = version
    for saver, folder in zip(savers, folders, strict=True):
        saver.dirpath = folder


def continue_logs(trainer: "pl.Trainer") -> None:
    """Log behind what an earlier rank 0 has logged, on the rank that has taken its place.

    A CSV logger's writer would begin by deleting the file.
    """
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and logger._experiment is None:
            path = Path(logger.log_dir) / "metrics.csv"
            written = path.read_text() if path.exists() else ""
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*exists and is not empty")
                writer = logger.experiment
            if written:
                path.write_text(written)
                writer.metrics_keys = written.splitlines()[0].split(",")


def newest_checkpoint(trainer: "pl.Trainer") -> str | None:
    """The newest file that this fit has saved or begun with, as far as this rank can see."""
    paths = [trainer.ckpt_path]
    for saver in trainer.checkpoint_callbacks:
        if isinstance(saver, ModelCheckpoint):
            paths += [saver.last_model_path, saver.best_model_path, *saver.best_k_models]
    found = [str(path) for path in paths if path and Path(path).exists()]
    return max(found, key=os.path.getmtime, default=None)


def load_checkpoint(trainer: "pl.Trainer", path: str) -> None:
    """Go back to a checkpoint in the middle of a fit; each rank must call."""
    connector = trainer._checkpoint_connector
    connector._restore_modules_and_callbacks(path)
    connector.restore_training_state()
    connector.resume_end()


def epoch_of_samplers(trainer: "pl.Trainer") -> int:
    """The number of the epoch that samplers have been told."""
    epoch: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
    return epoch


def measure_epoch(trainer: "pl.Trainer") -> None:
    """Have the loop take as many batches as the loader has in the epoch that begins.

    Lightning asks once; here an epoch in which ranks came or went has a length of its own.

    Raises:
        ConfigError: There are several training loaders.
    """
    loop = trainer.fit_loop
    loader = loop._combined_loader
    assert loader is not None
    if len(loader.flattened) != 1:
        raise ConfigError(
            f"Elastic training deals the samples of one training loader, got "
            f"{len(loader.flattened)} that are combined. Combine the datasets instead, with "
            f"torch's ConcatDataset or StackDataset."
        )
    (only,) = loader.flattened
    num_batches = _parse_num_batches(RunningStage.TRAINING, len(only), trainer.limit_train_batches)
    if num_batches != loop.max_batches:
        loader.limits, loop.max_batches = [num_batches], num_batches
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, int(num_batches * trainer.val_check_interval))


def handle_sigterm(trainer: "pl.Trainer", handler: Callable[[int, FrameType | None], None]) -> None:
    """Have this called on SIGTERM during the run; before Lightning registers its handlers."""
    connector: Any = trainer._signal_connector
    connector._sigterm_notifier_fn = handler
