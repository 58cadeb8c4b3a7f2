"""The private names of Lightning that elastic training touches.

Checked with lightning 2.6; `tests/elastic/test_lightning.py` fails when one changes.

Values that were logged in this epoch go back with the steps that are done again, and newcomers know
what is logged, since every rank takes part where sums come together. Metric objects are left alone.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from lightning_shard.checkpoint.files.parts import by_age, checkpoints_in, completed_at
from lightning_shard.checkpoint.files.places import fresh_place, inside
from lightning_shard.checkpoint.full import module_shapes, optimizer_shapes
from lightning_shard.elastic.elastic_sampler import ElasticBatchSampler
from lightning_shard.errors import ConfigError

FitLoop = _FitLoop
random_states = _collect_rng_states
set_random_states = _set_rng_states
TrainingEpochLoop = _TrainingEpochLoop

_RUNNING = "lightning_shard_running"
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
# Of a ModelCheckpoint, beside its state_dict; as when it is made
_NOTHING_SAVED = {
    "_last_global_step_saved": 0,
    "_last_checkpoint_saved": "",
    "_defer_save_until_validation": False,
    "current_score": None,
}
_SAVED = tuple(_NOTHING_SAVED)


def trainer_state(trainer: "pl.Trainer") -> dict[str, Any]:
    """Return the entries of a fitting trainer's checkpoint beside the model and the optimizers.

    Hooks that save see the dictionary that Lightning gives them, where these have no elements.
    """
    connector = trainer._checkpoint_connector
    with _giving_shapes(trainer):
        state: dict[str, Any] = connector.dump_checkpoint(weights_only=False)
    for name in ("state_dict", "optimizer_states", *_hyper_parameters(trainer)):
        state.pop(name, None)  # every rank has them: they do not travel
    state[_RUNNING] = _running_state(trainer)
    return state


def load_trainer_state(trainer: "pl.Trainer", state: dict[str, Any]) -> None:
    """Load what `trainer_state` has returned on this rank or another; no communication."""
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = state
    running = state.pop(_RUNNING)
    state.update(_live_entries(trainer))
    try:
        connector.restore_datamodule()
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", state)
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        trainer.fit_loop.load_state_dict(state["loops"]["fit_loop"])
        connector.restore_lr_schedulers()
    finally:
        connector._loaded_checkpoint = {}
    _load_running_state(trainer, running)


@contextmanager
def _giving_shapes(trainer: "pl.Trainer") -> Iterator[None]:
    """Give code that asks the strategy for model or optimizer state tensors without elements."""
    own, looks = vars(trainer.strategy), _has_onlookers(trainer)
    strategy: Any = trainer.strategy
    own["lightning_module_state_dict"] = lambda: (
        module_shapes(trainer.lightning_module, strategy.engine) if looks else {}
    )
    own["optimizer_state"] = lambda optimizer: (
        optimizer_shapes(_raw(optimizer), strategy.engine) if looks else {}
    )
    try:
        yield
    finally:
        del own["lightning_module_state_dict"], own["optimizer_state"]


def _raw(optimizer: Any) -> Optimizer:
    raw: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return raw


def _live_entries(trainer: "pl.Trainer") -> dict[str, Any]:
    """The entries of a checkpoint that did not travel."""
    entries: dict[str, Any] = {"state_dict": {}, "optimizer_states": []}
    if _has_onlookers(trainer):
        engine = trainer.strategy.engine  # type: ignore[attr-defined]
        entries["state_dict"] = module_shapes(trainer.lightning_module, engine)
        entries["optimizer_states"] = [optimizer_shapes(one, engine) for one in trainer.optimizers]
    return entries | _hyper_parameters(trainer)


def _hyper_parameters(trainer: "pl.Trainer") -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for owner in (trainer.lightning_module, trainer.datamodule):  # type: ignore[attr-defined]
        if owner and owner.hparams:
            entries[owner.CHECKPOINT_HYPER_PARAMS_KEY] = dict(owner.hparams)
            entries[owner.CHECKPOINT_HYPER_PARAMS_NAME] = getattr(owner, "_hparams_name", None)
            entries[owner.CHECKPOINT_HYPER_PARAMS_TYPE] = type(owner.hparams)
    return entries


def _has_onlookers(trainer: "pl.Trainer") -> bool:
    """Whether anybody's hooks see what is in a checkpoint."""
    hooks = ("on_save_checkpoint", "on_load_checkpoint")
    owner: Any = trainer
    owners: list[tuple[Any, type]] = [(owner.lightning_module, pl.LightningModule)]
    owners += [(one, pl.Callback) for one in owner.callbacks]
    return any(is_overridden(hook, one, kind) for hook in hooks for one, kind in owners)


def _running_state(trainer: "pl.Trainer") -> dict[str, Any]:
    """Return the state that decides about later collective calls but is in no checkpoint."""
    connector = trainer._logger_connector
    return {
        "should_stop": trainer.should_stop,
        "metrics": move_data_to_device(
            {name: vars(connector)[name] for name in _METRICS}, torch.device("cpu")
        ),
        "savers": [
            {name: vars(saver)[name] for name in _SAVED} for saver in _model_savers(trainer)
        ],
    }


def _load_running_state(trainer: "pl.Trainer", running: dict[str, Any]) -> None:
    trainer.should_stop = running["should_stop"]
    metrics = move_data_to_device(running["metrics"], trainer.strategy.root_device)
    vars(trainer._logger_connector).update(metrics)
    for saver, saved in zip(_model_savers(trainer), running["savers"], strict=True):
        vars(saver).update(saved)
    _go_on_timing(trainer)


def _go_on_timing(trainer: "pl.Trainer") -> None:
    """Count from now on, behind the time that was loaded, which has that since the start in it."""
    for timer in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(timer, Timer) and timer.start_time() is not None:
            timer._start_time[RunningStage.TRAINING] = time.monotonic()


def is_time(owner: Any, name: str) -> bool:
    """Whether an attribute is a Timer's time, which goes on from what was loaded."""
    return isinstance(owner, Timer) and name in ("_start_time", "_end_time", "_offset")


def _model_savers(trainer: "pl.Trainer") -> list[ModelCheckpoint]:
    return [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]


def begin_anew(trainer: "pl.Trainer", *, mid_epoch: bool) -> None:
    """Leave whatever hook, stage or data the trainer was in, and ask for the data anew."""
    loop = trainer.fit_loop
    val_loop = loop.epoch_loop.val_loop
    if trainer.validating and trainer.lightning_module is not None:
        val_loop._module_mode.restore(trainer.lightning_module)
    trainer.training = True
    val_loop._has_run = False
    val_loop._results.reset()  # of batches that are validated again
    trainer.lightning_module._current_fx_name = None
    trainer._logger_connector._current_fx = None
    trainer._logger_connector._first_loop_iter = False if mid_epoch else None
    fetcher = loop._data_fetcher
    if fetcher is not None and fetcher.combined_loader._iterator is not None:
        fetcher.teardown()  # reads the length of the iterator, which may be unmade
    loop._data_fetcher = None  # and so does the trainer's own end
    forget_data(trainer)
    loop.setup_data()
    if val_loop._combined_loader is not None:
        val_loop._combined_loader = None
        val_loop.batch_progress.reset_on_run()


def forget_data(trainer: "pl.Trainer") -> None:
    """Have the training loader asked for anew when it is needed."""
    trainer.fit_loop._combined_loader = None


def training_dataset(trainer: "pl.Trainer") -> Any:
    """Return the dataset of the training loader; None where there is no loader yet."""
    combined = trainer.fit_loop._combined_loader
    return None if combined is None else getattr(combined.flattened[0], "dataset", None)


def share_places(trainer: "pl.Trainer", broadcast: Callable[[Any], Any]) -> None:
    """Have every rank log and save where rank 0 does, should it come to be rank 0 itself."""
    savers = _model_savers(trainer)
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
    """Log behind what an earlier rank 0 has logged, where a CSV logger's writer would delete it."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and logger._experiment is None:
            filesystem, path = fresh_place(inside(logger.log_dir, "metrics.csv"))
            written = filesystem.cat_file(path).decode() if filesystem.exists(path) else ""
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*exists and is not empty")
                writer = logger.experiment
            if written:
                filesystem.pipe_file(path, written.encode())
                writer.metrics_keys = written.splitlines()[0].split(",")


def emergency_place(trainer: "pl.Trainer") -> str:
    """Return where to save a fit that ends early: where `ckpt_path="last"` finds it, if it can."""
    name = f"elastic-step={trainer.global_step}"
    for saver in _model_savers(trainer):
        if saver.dirpath and (saver.save_top_k != 0 or saver.save_last):
            last = f"{saver.CHECKPOINT_NAME_LAST}-{name}{saver.FILE_EXTENSION}"
            return os.path.join(saver.dirpath, last)
    return os.path.join(trainer.default_root_dir, f"{name}.ckpt")


def newest_checkpoint(trainer: "pl.Trainer", since: float) -> str | None:
    """Return the newest file that this fit has saved or begun with, as far as this rank can see."""
    paths = [str(one) for one in (trainer.ckpt_path,) if one]
    for saver in _model_savers(trainer):
        known = [saver.last_model_path, saver.best_model_path, *saver.best_k_models]
        paths += [one for one in known if one]
        found = checkpoints_in(saver.dirpath, saver.FILE_EXTENSION) if saver.dirpath else ()
        paths += [one for one in found if (completed_at(one) or 0.0) >= since]
    there = reversed(by_age(dict.fromkeys(paths)))
    return next((path for path in there if _is_full(trainer, path)), None)


def _is_full(trainer: "pl.Trainer", path: str) -> bool:
    """Whether one can be gone back to: not weights alone, nor one whose writer was lost."""
    strategy: Any = trainer.strategy
    try:
        checkpoint = strategy.run.checkpoints.read_alone(path)
    except Exception as error:  # of any format
        rank_zero_warn(f"{path} cannot be read and is passed over: {type(error).__name__}: {error}")
        return False
    return "optimizer_states" in checkpoint


def load_checkpoint(trainer: "pl.Trainer", path: str) -> None:
    """Go back to a checkpoint in the middle of a fit; each rank must call."""
    connector = trainer._checkpoint_connector
    connector._restore_modules_and_callbacks(path)
    connector.restore_training_state()
    connector.resume_end()
    _load_running_state(
        trainer,
        {
            "should_stop": False,
            "metrics": {name: {} for name in _METRICS},
            "savers": [_NOTHING_SAVED for _ in _model_savers(trainer)],
        },
    )


def epoch_of_samplers(trainer: "pl.Trainer") -> int:
    """The number of the epoch that samplers have been told."""
    epoch: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
    return epoch


def val_check_interval(trainer: "pl.Trainer") -> float | None:
    """The Trainer's option, in batches or as a share of an epoch's; None if it is a time."""
    return getattr(trainer, "val_check_interval", None)


def is_within_step(trainer: "pl.Trainer") -> bool:
    """Whether the last batch was accumulated, and the optimizer's step is still to come."""
    accumulates: bool = trainer.fit_loop.epoch_loop._should_accumulate()
    return accumulates


def measure_epoch(trainer: "pl.Trainer") -> None:
    """Have the loop, which asks once, take as many batches as the loader has in this epoch."""
    loop = trainer.fit_loop
    loader = loop._combined_loader
    assert loader is not None
    if len(loader.flattened) != 1:
        raise ConfigError(
            f"Elastic training assigns the samples of one training loader, got "
            f"{len(loader.flattened)} that are combined. Combine the datasets instead, with "
            f"torch's ConcatDataset or StackDataset."
        )
    (only,) = loader.flattened
    num_batches: float = len(only)
    sampler = only.batch_sampler
    if not (isinstance(sampler, ElasticBatchSampler) and sampler.holds_global_batch):
        limit = trainer.limit_train_batches
        num_batches = _parse_num_batches(RunningStage.TRAINING, len(only), limit)
    if num_batches != loop.max_batches:
        loader.limits, loop.max_batches = [num_batches], num_batches
        interval = val_check_interval(trainer)
        if isinstance(interval, float):
            trainer.val_check_batch = max(1, int(num_batches * interval))


@dataclass(frozen=True, kw_only=True)
class LoggedSum:
    """One value that is logged, summed up over the epoch.

    Attributes:
        how: The arguments of `log`, but for what belongs to one process.
        is_idle: Whether nothing has been logged since the last reset.
    """

    how: dict[str, Any]
    is_shared: bool
    rank_zero_only: bool
    operation: str | None
    sums: dict[str, Tensor]
    count: int
    is_idle: bool

    @classmethod
    def of(cls, metric: _ResultMetric) -> "LoggedSum":
        """Copy what one of Lightning's metrics has summed up."""
        sync = metric.meta.sync
        return cls(
            how={
                one.name: getattr(metric.meta, one.name)
                for one in fields(metric.meta)
                if one.name != "_sync"
            },
            is_shared=sync.should,
            rank_zero_only=sync.rank_zero_only,
            operation=sync.op,
            sums={name: getattr(metric, name).detach().cpu().clone() for name in metric._defaults},
            count=metric._update_count,
            is_idle=metric.has_reset,
        )

    def put_into(self, metric: _ResultMetric, *, emptied: bool) -> None:
        """Set a metric's sums, or none of them where it is to be `emptied`."""
        if emptied:
            metric.reset()
        else:
            for name, value in self.sums.items():
                setattr(metric, name, value.to(getattr(metric, name).device))
        # Without values, too: all ranks must take part where sums come together.
        metric._update_count, metric.has_reset = self.count, self.is_idle
        metric._computed = None

    def made(self, reduce: Callable[..., Any]) -> _ResultMetric:
        """Make a metric that logs alike, without a value."""
        meta = _Metadata(**self.how)
        meta.sync = _Sync(
            fn=reduce,
            _should=self.is_shared,
            rank_zero_only=self.rank_zero_only,
            _op=self.operation,
        )
        return _ResultMetric(meta, is_tensor=True)


EpochLogs = dict[str, LoggedSum]


def _results(trainer: "pl.Trainer") -> _ResultCollection:
    results = trainer.fit_loop.epoch_loop._results
    assert results is not None
    return results


def take_logs(trainer: "pl.Trainer") -> EpochLogs:
    """Return what this rank has logged in this epoch, by Lightning's keys."""
    results = _results(trainer)
    return {key: LoggedSum.of(metric) for key, metric in results.items() if metric.is_tensor}


def put_logs(
    trainer: "pl.Trainer", logs: EpochLogs, *, reduce: Callable[..., Any], emptied: bool
) -> None:
    """Have a fit hold these logged values and no others."""
    results = _results(trainer)
    for key in [key for key, metric in results.items() if metric.is_tensor and key not in logs]:
        del results[key]
    for key, logged in logs.items():
        if key not in results:
            results[key] = logged.made(reduce)
        logged.put_into(results[key], emptied=emptied)
