"""The private names of Lightning that say what a module is attached to, and what that was asked.

Checked with lightning 2.6; `tests/strategies/trainer/test_lightning_loops.py` fails when one
changes.
"""

from typing import Any


def asked_layer_sync(trainer: Any) -> Any:
    """Return the synchronization of batch norms that a trainer gives any strategy."""
    return trainer._accelerator_connector._layer_sync


def own_trainer(module: Any) -> Any:
    """Return the Trainer that a module is attached to, and not its Fabric; None for none."""
    return module._trainer


def runners_of(module: Any) -> tuple[Any, ...]:
    """Return the Trainer, or the Fabric, that a module is attached to."""
    return tuple(one for one in (module._trainer, module._fabric) if one is not None)
