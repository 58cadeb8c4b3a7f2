"""The private names of Lightning that elastic training needs; ranks that are lost at once."""

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.trainer.states import TrainerFn

import lightning_shard
from lightning_shard.checkpoint.files.parts import part_of
from lightning_shard.elastic._lightning import begin_anew, continue_logs, newest_checkpoint
from lightning_shard.strategies.checkpoint_files import CheckpointFiles
from tests.checkpoint.files.archives import checkpoint
from tests.patience import patient
from tests.processes import REPOSITORY


def new_trainer() -> Any:
    return pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", devices=1)


def test_the_fit_loop_runs_as_ours_does() -> None:
    source = inspect.getsource(_FitLoop.run)
    order = ["setup_data", "skip", "reset", "on_run_start", "self.done", "on_advance_start"]
    order += ["advance()", "on_advance_end", "on_iteration_done", "on_run_end"]
    places = [source.index(name) for name in order]
    assert places == sorted(places)


def test_the_epoch_loop_resets_and_advances() -> None:
    assert list(inspect.signature(_TrainingEpochLoop.advance).parameters) == [
        "self",
        "data_fetcher",
    ]
    source = inspect.getsource(_TrainingEpochLoop.run)
    assert source.index("self.reset()") < source.index("self.on_run_start(data_fetcher)")
    assert "checkpoint that ended before the epoch ended" in inspect.getsource(
        _TrainingEpochLoop.reset
    )


def test_what_the_loops_hold() -> None:
    trainer = new_trainer()
    loop = trainer.fit_loop
    for name in ("_combined_loader", "_data_fetcher", "max_batches", "epoch_progress"):
        assert name in vars(loop)
    for name in ("_results", "val_loop", "batch_progress"):
        assert name in vars(loop.epoch_loop)
    for name in ("_has_run", "_module_mode", "_combined_loader", "batch_progress"):
        assert name in vars(loop.epoch_loop.val_loop)
    assert {"ready", "started", "processed", "completed"} <= set(
        vars(loop.epoch_loop.batch_progress.current)
    )


def test_what_the_connectors_hold() -> None:
    trainer = new_trainer()
    assert {"_first_loop_iter", "_current_fx"} <= set(vars(trainer._logger_connector))
    assert "_current_fx_name" in vars(pl.LightningModule())
    assert trainer._signal_connector._sigterm_notifier_fn
    for name in (
        "restore_datamodule",
        "restore_callbacks",
        "restore_precision_plugin_state",
        "restore_lr_schedulers",
        "restore_training_state",
        "resume_end",
        "dump_checkpoint",
        "_restore_modules_and_callbacks",
    ):
        assert callable(getattr(_CheckpointConnector, name))
    assert "_loaded_checkpoint" in vars(trainer._checkpoint_connector)


def test_the_hooks_that_save_and_load() -> None:
    for name in (
        "_call_callbacks_state_dict",
        "_call_callbacks_on_save_checkpoint",
        "_call_lightning_module_hook",
        "_call_lightning_datamodule_hook",
    ):
        assert callable(getattr(call, name))
    parameters = list(inspect.signature(_parse_num_batches).parameters)
    assert parameters == ["stage", "length", "limit_batches"]


def test_random_states_come_and_go() -> None:
    states = _collect_rng_states(include_cuda=False)
    assert {"torch", "python"} <= set(states)
    _set_rng_states(states)


def test_what_is_logged_is_kept_with_how_it_is_logged() -> None:
    assert {one.name for one in fields(_Metadata)} >= {"fx", "name", "on_epoch", "_sync"}
    assert [one.name for one in fields(_Sync)][:5] == [
        "fn",
        "_should",
        "rank_zero_only",
        "_op",
        "_group",
    ]
    meta = _Metadata("training_step", "loss")
    meta.sync = _Sync()
    metric = _ResultMetric(meta, is_tensor=True)
    assert {"value", "cumulated_batch_size"} == set(metric._defaults)
    assert {"has_reset", "_update_count", "_computed"} <= set(vars(metric))


def test_a_loggers_version_is_where_it_is_shared() -> None:
    assert {"_version", "_experiment"} <= set(vars(CSVLogger("somewhere")))


def test_a_csv_loggers_writer_deletes_what_is_there(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.save()
    assert "loss" in logger.experiment.metrics_keys
    trainer = pl.Trainer(
        logger=CSVLogger(tmp_path, version=0),
        enable_checkpointing=False,
        accelerator="cpu",
        devices=1,
    )
    continue_logs(trainer)
    trainer.logger.log_metrics({"accuracy": 2.0}, step=1)
    trainer.logger.save()
    rows = (Path(trainer.logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert len(rows) == 3
    assert "loss" in rows[0]


def test_what_is_due_by_batches_is_asked_in_two_methods() -> None:
    validates = inspect.getsource(_TrainingEpochLoop._should_check_val_fx)
    assert "% self.trainer.val_check_batch == 0" in validates
    assert validates.count("self.trainer.check_val_every_n_epoch is None") == 1
    steps = _TrainingEpochLoop._update_learning_rates
    assert "current_idx % config.frequency == 0" in inspect.getsource(steps)
    parameters = list(inspect.signature(steps).parameters)
    assert parameters == ["self", "interval", "update_plateau_schedulers"]
    assert "self._should_accumulate()" in inspect.getsource(_TrainingEpochLoop.update_lr_schedulers)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
def test_a_rank_lost_before_its_loaders_iterator_is_made_does_not_end_the_others() -> None:
    """Lightning's fetcher asks for the length of that iterator, where it ends as well."""
    trainer, module = new_trainer(), BoringModel()
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module)
    trainer.state.fn = TrainerFn.FITTING
    loop = trainer.fit_loop
    loop.setup_data()
    loop._combined_loader._iterator = None
    begin_anew(trainer, mid_epoch=False)
    assert loop._combined_loader._iterator is not None
    assert next(loop._data_fetcher) is not None


def test_a_file_that_is_not_whole_is_passed_over(tmp_path: Path) -> None:
    trainer = L.Trainer(
        strategy=lightning_shard.ElasticStrategy(backend="in_process", num_ranks=2),
        accelerator="cpu",
        logger=False,
        callbacks=[ModelCheckpoint(tmp_path)],
    )
    names = ["whole", "flipped", "cut_off", "empty"]
    paths = [tmp_path / f"{name}.ckpt" for name in names]
    for path in [*paths, part_of(tmp_path / "last.ckpt")]:
        CheckpointFiles().save_checkpoint(checkpoint(), path)
    content = bytearray(paths[0].read_bytes())
    weight = checkpoint()["state_dict"]["0.weight"].numpy().tobytes()
    content[content.index(weight) + 5] ^= 1
    paths[1].write_bytes(content)
    paths[2].write_bytes(content[: len(content) // 2])
    paths[3].write_bytes(b"")
    for number, path in enumerate(paths):
        os.utime(path, (1000 + number, 1000 + number))
    with pytest.warns(UserWarning, match="cannot be read and is passed over: CheckpointError"):
        assert newest_checkpoint(trainer, since=0) == str(paths[0])


@pytest.mark.slow
def test_who_is_left_steps_again_whoever_was_lost_and_whenever() -> None:
    """Survivors stood still for the whole time-out, here ten minutes, after some losses."""
    command = [sys.executable, "-m", "tests.elastic.early_losses", "4", "40", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    driver = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True, **pipes)
    try:
        printed, errors = driver.communicate(timeout=patient(280))
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(driver.pid, signal.SIGKILL)
    assert driver.returncode == 0, errors
    said = json.loads(printed)
    assert said["statuses"] == [0, 0, 0]
    assert len(said["seconds"]) == 40
