"""The private names of Lightning that the launchers touch.

Checked with lightning 2.6; `tests/launchers/test_lightning.py` fails when one changes.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
from lightning.pytorch.trainer.call import _call_and_handle_interrupt
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExit

__all__ = [
    "Launcher",
    "TunerExit",
    "call_and_handle_interrupt",
    "forget_identities",
    "forget_launcher",
]


def call_and_handle_interrupt(
    trainer: "pl.Trainer", function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call as Lightning does: on an exception callbacks hear of it and the trainer is torn down."""
    return _call_and_handle_interrupt(trainer, function, *args, **kwargs)


def forget_launcher(trainer: "pl.Trainer") -> None:
    """Have this trainer run its functions right where they are called."""
    trainer.strategy._launcher = None


def forget_identities(module: "pl.LightningModule") -> None:
    """Drop the module's table of its metrics by `id`, which a copy has inherited and got wrong."""
    module._metric_attributes = None
