"""The private names of Lightning's loops that strategies need; a failure says what has changed."""

import inspect
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.connectors import data_connector

from lightning_shard.strategies.trainer._lightning import (
    after_optimizer_steps,
    after_training_epochs,
    around_validation,
    before_training_ends,
    preparing_dataloaders,
    without_sigterm_broadcast,
)


def new_trainer() -> Any:
    return pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", devices=1)


def test_a_loader_gets_its_sampler_in_a_method_of_the_data_connector() -> None:
    trainer = new_trainer()
    prepare = trainer._data_connector._prepare_dataloader
    with preparing_dataloaders(trainer, lambda own: own):
        assert trainer._data_connector._prepare_dataloader() == prepare
    assert list(inspect.signature(prepare).parameters) == ["dataloader", "shuffle", "mode"]
    source = inspect.getsource(data_connector._process_dataloader)
    assert "_data_connector._prepare_dataloader(" in source


def test_the_epoch_loop_broadcasts_sigterm_in_a_method_of_its_own() -> None:
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)
    assert "broadcast" not in inspect.getsource(_TrainingEpochLoop.advance).replace(
        "self._broadcast_sigterm_tensor()", ""
    )
    method = _TrainingEpochLoop._broadcast_sigterm_tensor
    assert list(inspect.signature(method).parameters) == ["self"]


def test_a_validation_is_one_call_with_all_its_hooks() -> None:
    assert "self.val_loop.run()" in inspect.getsource(_TrainingEpochLoop.on_advance_end)
    source = inspect.getsource(_EvaluationLoop)  # of the method it would be its decorator's
    run = source[source.index("def run(self)") : source.index("def setup_data")]
    assert run.index("self.on_run_start()") < run.index("return self.on_run_end()")
    starts, ends = (
        inspect.getsource(method)
        for method in (_EvaluationLoop.on_run_start, _EvaluationLoop.on_run_end)
    )
    for hook in ("model_eval", "start", "epoch_start"):
        assert f"self._on_evaluation_{hook}(" in starts
    for hook in ("epoch_end", "end", "model_train"):
        assert f"self._on_evaluation_{hook}(" in ends


def test_an_epoch_is_one_call_before_the_hooks_of_its_end() -> None:
    assert "self.epoch_loop.run(self._data_fetcher)" in inspect.getsource(_FitLoop.advance)
    assert "on_train_epoch_end" in inspect.getsource(_FitLoop.on_advance_end)
    parameters = list(inspect.signature(_TrainingEpochLoop.run).parameters)
    assert parameters == ["self", "data_fetcher"]


def test_automatic_optimization_counts_a_step_in_a_method_of_its_own() -> None:
    assert "self._optimizer_step(batch_idx, closure)" in inspect.getsource(
        _AutomaticOptimization.run
    )
    source = inspect.getsource(_AutomaticOptimization._optimizer_step)
    assert source.index('"optimizer_step"') < source.index("step.increment_completed()")


def test_the_end_of_a_fit_is_one_call_with_its_hooks() -> None:
    assert "self.on_run_end()" in inspect.getsource(_FitLoop.run)
    source = inspect.getsource(_FitLoop.on_run_end)
    assert source.count('"on_train_end"') == 3  # of callbacks, the module and the strategy
    assert list(inspect.signature(_FitLoop.on_run_end).parameters) == ["self"]


def test_the_loops_are_as_before_afterwards() -> None:
    trainer = new_trainer()
    loop = trainer.fit_loop.epoch_loop
    names = set(vars(loop)), set(vars(loop.val_loop)), set(vars(trainer.fit_loop))
    with (
        without_sigterm_broadcast(trainer),
        around_validation(trainer, nullcontext),
        after_training_epochs(trainer, lambda: None),
        after_optimizer_steps(trainer, lambda: None),
        before_training_ends(trainer, lambda: None),
    ):
        assert "on_run_end" in vars(trainer.fit_loop)
        assert {"_broadcast_sigterm_tensor", "run"} <= vars(loop).keys()
        assert "run" in vars(loop.val_loop)
        assert "_optimizer_step" in vars(loop.automatic_optimization)
    assert "_optimizer_step" not in vars(loop.automatic_optimization)
    now = set(vars(loop)), set(vars(loop.val_loop)), set(vars(trainer.fit_loop))
    assert now == names
