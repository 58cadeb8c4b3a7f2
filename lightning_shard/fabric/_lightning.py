"""The private names of Fabric that this room touches.

Checked with lightning 2.6; `tests/fabric/test_ranks.py`, `tests/fabric/test_states.py` and
`tests/fabric/test_raw_loops.py` fail when one changes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.fabric import fabric as fabric_module
from lightning.fabric.strategies.launchers.launcher import _Launcher
from lightning.fabric.strategies.strategy import (
    _BackwardSyncControl,
    _validate_keys_for_strict_loading,
)
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch.loops.fit_loop import _FitLoop

BackwardSyncControl = _BackwardSyncControl
EmptyInit = _EmptyInit
check_keys_are_there = _validate_keys_for_strict_loading
Launcher = _Launcher


def fabric_of(function: Callable[..., Any]) -> Any:
    """Return the Fabric whose launched function this is; None for any other function."""
    method = function.func if isinstance(function, partial) else None
    owner = getattr(method, "__self__", None)
    return owner if isinstance(owner, fabric_module.Fabric) else None


def has_no_function(function: Callable[..., Any]) -> bool:
    """Whether this is what Fabric launches for `fabric.launch()` without a function."""
    nothing: Any = fabric_module._do_nothing
    return isinstance(function, partial) and nothing in function.args


def progress_after(steps: int, num_optimizers: int, epoch: int, batch: int) -> dict[str, Any]:
    """Return the state of a Trainer's loops after so many steps, between two batches."""
    no_trainer: Any = None
    loop: Any = _FitLoop(no_trainer)
    of_epoch = loop.epoch_loop
    of_epoch._batches_that_stepped = steps // max(num_optimizers, 1)
    loop.epoch_progress.increment_by(epoch)
    if batch:
        loop.epoch_progress.increment_ready()
        loop.epoch_progress.increment_started()
    of_epoch.batch_progress.increment_by(batch)
    of_epoch.scheduler_progress.increment_by(steps)
    if num_optimizers > 1:  # Lightning steps several by hand alone
        of_epoch.manual_optimization.optim_step_progress.increment_by(steps)
    else:
        automatic = of_epoch.automatic_optimization.optim_progress.optimizer
        automatic.step.increment_by(steps)
        automatic.zero_grad.increment_by(steps)
    state: dict[str, Any] = loop.state_dict()
    return state
