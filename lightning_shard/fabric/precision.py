"""Fabric's precision plugins on shards: only a loss scaler has to know of the other ranks.

Averaging, clipping and the formats of parameters are the strategy's and the engine's.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.fabric.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)

from lightning_shard.backends.collectives import Collectives
from lightning_shard.errors import ConfigError
from lightning_shard.precision.scaler import ShardedGradScaler

_KNOWN = (Precision, HalfPrecision, DoublePrecision, MixedPrecision)


def checked_plugin(plugin: Precision | None) -> Precision | None:
    """Return a plugin that works on shards.

    Raises:
        ConfigError: It does not.
    """
    if plugin is None or type(plugin) in _KNOWN:
        return plugin
    raise ConfigError(
        f"The precision plugin {type(plugin).__name__} does not work on sharded models; use "
        f"Fabric(precision=...) with 32-true, 64-true, bf16-true, bf16-mixed, 16-true or 16-mixed."
    )


def share_scaler(
    plugin: Any,
    view: Callable[[], AbstractContextManager[None]],
    groups: Sequence[Collectives],
    device: torch.device,
) -> None:
    """Let a plugin's loss scaler, where it has one, see the overflows of all ranks.

    Args:
        plugin: A plugin of Fabric.
        view: Shows the optimizers' shards while it is open.
        groups: The groups over which the shards lie.
        device: This rank's device.
    """
    scaler = getattr(plugin, "scaler", None)
    if isinstance(scaler, ShardedGradScaler):  # of a launch before this one
        scaler = scaler.plain()
    if scaler is not None:
        plugin.scaler = ShardedGradScaler(scaler, view, groups, device)
