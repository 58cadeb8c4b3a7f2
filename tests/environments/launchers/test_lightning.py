"""The private names of Lightning that the launchers need; a failure says what has changed."""

import inspect
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.call import _call_and_handle_interrupt
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.utilities.exceptions import _TunerExitException


def test_launcher_is_an_abstract_class_with_these_methods() -> None:
    assert _Launcher.__abstractmethods__ == {"is_interactive_compatible", "kill", "launch"}


def test_call_and_handle_interrupt_takes_a_trainer_and_a_function() -> None:
    parameters = list(inspect.signature(_call_and_handle_interrupt).parameters)
    assert parameters == ["trainer", "trainer_fn", "args", "kwargs"]


def test_the_strategys_launcher_and_the_modules_table_of_metrics() -> None:
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    assert trainer.strategy._launcher is None
    assert pl.LightningModule()._metric_attributes is None


def test_the_connector_asks_a_flag_of_its_module_whether_this_is_a_notebook() -> None:
    assert isinstance(accelerator_connector._IS_INTERACTIVE, bool)
    source = inspect.getsource(accelerator_connector._AcceleratorConnector._lazy_init_strategy)
    assert source.index("_configure_launcher()") < source.index("if _IS_INTERACTIVE")


def test_leaving_a_tuning_run_is_no_failure_there_either() -> None:
    assert "except _TunerExitException" in inspect.getsource(_call_and_handle_interrupt)
    assert issubclass(_TunerExitException, Exception)


def test_what_a_survivors_results_are_made_of() -> None:
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    assert callable(trainer._teardown)
    for name in ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics"):
        assert vars(trainer._logger_connector)[name] == {}
    loop = trainer.fit_loop
    assert isinstance(loop.epoch_progress, _BaseProgress)
    assert isinstance(loop.epoch_loop, _Loop)
    assert vars(loop.epoch_loop)["_batches_that_stepped"] == 0


def test_who_hears_of_an_exception_and_in_which_order() -> None:
    source = inspect.getsource(call._interrupt)
    places = [
        source.index(text)
        for text in (
            "_call_callback_hooks",
            "trainer.datamodule is not None",
            "strategy.on_exception",
            "finalize",
        )
    ]
    assert places == sorted(places)
    assert "in callbacks" in inspect.getsource(call._call_callback_hooks)
    assert "trainer.callbacks" in inspect.getsource(call._call_callback_hooks)
    assert not pl.Trainer(logger=False, accelerator="cpu")._signal_connector.received_sigterm


def test_trainers_and_fabric_wrap_constructors_of_loaders_with_one_function() -> None:
    from lightning.fabric import fabric
    from lightning.fabric.utilities.data import _replace_dunder_methods as original
    from lightning.pytorch.trainer.connectors import data_connector

    from lightning_shard.environments.launchers import in_process  # noqa: F401  it shares the contexts

    assert inspect.signature(original).parameters.keys() == {"base_cls", "store_explicit_arg"}
    wraps: list[Any] = [one._replace_dunder_methods for one in (fabric, data_connector)]  # type: ignore[attr-defined]
    assert wraps[0] is wraps[1]
