"""The Trainer's place in a fit: how far its loops are, and what has state beside the model.

It is taken when a batch has been fetched and nothing of it has begun, and set at the same moment.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.flat_parameters import FlatParameters
from lightning_shard.data_parallel.optimizer_entries import host_copy


def take_place(trainer: "pl.Trainer") -> dict[str, Any]:
    """Return the place of a fitting Trainer, as plain values; no hook of a checkpoint runs."""
    owner: Any = trainer
    state = {
        "loops": trainer.fit_loop.state_dict(),
        "schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
        "callbacks": {one.state_key: one.state_dict() for one in owner.callbacks},
        "precision": trainer.precision_plugin.state_dict(),
    }
    copied: dict[str, Any] = tree_map_only(Tensor, host_copy, deepcopy(state))
    return copied


def set_place(trainer: "pl.Trainer", place: dict[str, Any]) -> None:
    """Bring a Trainer to a place, inside its loops; callbacks that it has not are left out."""
    owner: Any = trainer
    loop = trainer.fit_loop
    loop.load_state_dict(deepcopy(place["loops"]))
    loop.on_iteration_done()  # nothing is resumed: the loops are where they would be
    loop.restarting = False
    for config, state in zip(trainer.lr_scheduler_configs, place["schedulers"], strict=True):
        config.scheduler.load_state_dict(deepcopy(state))
    for callback in owner.callbacks:
        if state := place["callbacks"].get(callback.state_key):
            callback.load_state_dict(deepcopy(state))
    if place["precision"]:
        trainer.precision_plugin.load_state_dict(place["precision"])


def take_buffers(module: "pl.LightningModule") -> dict[str, Tensor]:
    """Return copies of the module's buffers, in host memory."""
    return {name: host_copy(buffer) for name, buffer in module.named_buffers()}


@torch.no_grad()
def set_buffers(module: "pl.LightningModule", buffers: dict[str, Tensor]) -> None:
    """Set the module's buffers."""
    for name, buffer in module.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


def full_copies(engine: DataParallelEngine) -> list[Tensor]:
    """Return copies of the full parameters that a rank holds beside its shards, by buffer."""
    return [host_copy(flat.full) for flat in engine.flats if _is_beside(flat)]


@torch.no_grad()
def set_full(engine: DataParallelEngine, copies: Sequence[Tensor]) -> None:
    """Set what `full_copies` has copied."""
    flats = [flat for flat in engine.flats if _is_beside(flat)]
    for flat, copied in zip(flats, copies, strict=True):
        flat.full.copy_(copied)


def _is_beside(flat: FlatParameters) -> bool:
    return flat.stage in (1, 2)
