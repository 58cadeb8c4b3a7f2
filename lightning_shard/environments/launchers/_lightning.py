"""The private names of Lightning that the launchers touch.

Checked with lightning 2.6; `tests/environments/launchers/test_lightning.py` fails when one changes.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.fabric import fabric as fabric_module
from lightning.pytorch.loops.loop import _Loop as Loop
from lightning.pytorch.loops.progress import _BaseProgress as BaseProgress
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.call import _call_and_handle_interrupt
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.trainer.connectors import data_connector as data_connector_module
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import _TunerExitException

Launcher = _Launcher
SubprocessScriptLauncher = _SubprocessScriptLauncher
TunerExit = _TunerExitException
# On an exception it tells callbacks and tears down.
call_and_handle_interrupt = _call_and_handle_interrupt


def is_interactive() -> bool:
    """Whether Lightning takes this process for a notebook or a session of `python -i`."""
    connector: Any = accelerator_connector
    return bool(connector._IS_INTERACTIVE)


def forget_launcher(trainer: "pl.Trainer") -> None:
    """Have this trainer run its functions in the calling thread and process."""
    trainer.strategy._launcher = None


def forget_identities(module: "pl.LightningModule") -> None:
    """Drop the module's table of its metrics by `id`, which a copy has inherited and got wrong."""
    module._metric_attributes = None


def take_down(trainer: "pl.Trainer", error: BaseException) -> None:
    """Tear down a run that ended in the middle, without telling callbacks."""
    trainer.strategy.on_exception(error)
    trainer._teardown()
    trainer.state.stage = None


def mark_interrupted(trainer: "pl.Trainer") -> None:
    """Have `trainer.interrupted` say that the run has ended with an exception."""
    trainer.state.status = TrainerStatus.INTERRUPTED


def mark_terminated(trainer: "pl.Trainer") -> None:
    """Set `trainer.received_sigterm`."""
    trainer._signal_connector.received_sigterm = True


def skip_hooks_of_exception(trainer: "pl.Trainer") -> None:
    """Have Lightning call no `on_exception` for the error that is about to be raised.

    Until it calls the strategy's hook, the last one, the trainer has neither callbacks nor data.
    """
    strategy: Any = trainer.strategy
    owner: Any = trainer
    callbacks, datamodule = owner.callbacks, owner.datamodule

    def put_back(error: BaseException) -> None:
        owner.callbacks, owner.datamodule = callbacks, datamodule
        del strategy.on_exception
        strategy.on_exception(error)

    owner.callbacks, owner.datamodule = [], None
    strategy.on_exception = put_back


def copy_metrics(source: "pl.Trainer", target: "pl.Trainer") -> None:
    """Give a trainer that does not run the metrics of another that does not run either."""
    connector = target._logger_connector
    connector._callback_metrics = dict(source.callback_metrics)
    connector._logged_metrics = dict(source.logged_metrics)
    connector._progress_bar_metrics = dict(source.progress_bar_metrics)


def copy_progress(source: Loop, target: Loop) -> None:
    """Set a loop's counters, and those of the loops inside it, to another's."""
    for name, value in vars(source).items():
        mine = vars(target).get(name)
        if isinstance(value, BaseProgress) and isinstance(mine, BaseProgress):
            mine.load_state_dict(value.state_dict())
        elif isinstance(value, Loop) and isinstance(mine, Loop) and name != "trainer":
            copy_progress(value, mine)
        elif name == "_batches_that_stepped":
            vars(target)[name] = value


def copied_objects(source: "pl.Trainer", target: "pl.Trainer") -> dict[int, Any]:
    """Return by `id` what a trainer has in place of another's objects, as a deep copy's memo."""
    own, strategy = source.strategy, target.strategy
    schedulers = [config.scheduler for config in own.lr_scheduler_configs]
    taken = [*own.optimizers, *own._lightning_optimizers, *schedulers]
    loops = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
    return {
        **{id(one): one for one in taken},
        **{id(getattr(source, name)): getattr(target, name) for name in loops},
        id(source): target,
        id(own): strategy,
    }


def exchange_strategy(source: "pl.Trainer", target: "pl.Trainer") -> None:
    """Give a trainer's strategy, which keeps launcher and model, all else of another's."""
    strategy: Any = target.strategy
    kept = {"_launcher": strategy._launcher}
    model = strategy.lightning_module
    vars(strategy).clear()
    vars(strategy).update(vars(source.strategy), **kept)
    if run := vars(strategy).get("run"):
        run.strategy = strategy  # the other one's so far
    if model is not None:
        strategy.connect(model)


class _SharedContexts:
    """Contexts that stay open from the first entry to the last exit, whoever entered first."""

    def __init__(self, make: Callable[..., AbstractContextManager[None]]) -> None:
        self._make = make
        self._open: dict[tuple[Any, ...], tuple[int, ExitStack]] = {}

    @contextmanager
    def __call__(self, *args: Any) -> Iterator[None]:
        num_inside, stack = self._open.get(args) or (0, ExitStack())
        if num_inside == 0:
            stack.enter_context(self._make(*args))
        self._open[args] = num_inside + 1, stack
        try:
            yield
        finally:
            num_inside, stack = self._open.pop(args)
            if num_inside > 1:
                self._open[args] = num_inside - 1, stack
            else:
                stack.close()


def share_class_wrapping() -> None:
    """Let ranks of one process ask for loaders, or be launched by Fabric, at the same time.

    Each would take another's wrapper of a constructor of torch's for the original, and leave it.
    """
    owners: tuple[Any, ...] = (data_connector_module, fabric_module)
    shared = _SharedContexts(owners[0]._replace_dunder_methods)
    for owner in owners:
        owner._replace_dunder_methods = shared
