"""Saving and loading folders of the sharded format: no rank gathers what it saves or loads.

    lightning_module_state_dict,    boxes of this rank's shards, by the module's own names
    optimizer_state
    save_checkpoint                 writes them; the rest of Lightning's dictionary is meta.pt

    load_checkpoint                 meta.pt, and tensors of which nothing has been read
    load_model_state_dict           checks them against the module; buffers are loaded
    setup                           reads the weights into shards, once an engine has them
    load_optimizer_state_dict       reads the optimizers' state into shards

A module, or a callback, whose own code sees what is loaded gets full tensors instead.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.hooks import CheckpointHooks
from torch import nn
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.misfits import WEIGHTS_ADVICE, misfit_error
from lightning_shard.checkpoint.module_snapshot import ModuleSnapshot
from lightning_shard.checkpoint.optimizer_state import local_state_dict
from lightning_shard.checkpoint.resuming import agree_on_misfit
from lightning_shard.checkpoint.section import writable_section
from lightning_shard.checkpoint.sharded.boxed_tensor import BoxedTensor
from lightning_shard.checkpoint.sharded.folder import (
    WEIGHTS,
    StoredFolder,
    StoredTensor,
    has_stored,
    read_all,
)
from lightning_shard.checkpoint.sharded.load_hooks import loads_plainly
from lightning_shard.checkpoint.sharded.named_optimizers import (
    name_misfits,
    named_state,
    numbered_state,
)
from lightning_shard.checkpoint.sharded.reading import (
    local_optimizer_state,
    placeholders,
    read_weights,
)
from lightning_shard.checkpoint.sharded.stored_misfits import load_rest, weight_misfits
from lightning_shard.checkpoint.sharded.writing import verify_share
from lightning_shard.errors import ConfigError
from lightning_shard.parallel_dimensions.dimension import ParallelDimension
from lightning_shard.strategies.async_saves import AsyncSavingStrategy
from lightning_shard.strategies.checkpoint_files import CheckpointFiles
from lightning_shard.strategies.names import strategy_name

_OPTIMIZER = "optimizer_"
_LIGHTNING: str = pl.__version__  # type: ignore[attr-defined]
_NOTHING_KEPT = {  # what Lightning asks of a checkpoint, for a folder without meta.pt
    "pytorch-lightning_version": _LIGHTNING,
    "lr_schedulers": [],
    "callbacks": {},
    "epoch": 0,
    "global_step": 0,
}


class FolderStrategy(AsyncSavingStrategy):
    """Knows how a run's state goes to a folder and back."""

    dimensions: Sequence[ParallelDimension]
    saves_shards: ClassVar[bool] = True  # as they are while a file is written
    _stored_weights: Mapping[str, Any] | None = None  # to be read once there is an engine

    @property
    def _saves_boxes(self) -> bool:
        """Whether states are asked for as boxes."""
        return (
            self.checkpoint_format == "sharded" and self._engine is not None and self.saves_shards
        )

    @property
    def _present_collectives(self) -> Collectives | None:
        """The group of all ranks; None where this process is alone."""
        return self._collectives if dist.is_initialized() else None

    def _names(self) -> dict[nn.Parameter, str]:
        assert self.lightning_module is not None
        return {param: name for name, param in self.lightning_module.named_parameters()}

    def _check_writer(self, storage_options: Any) -> None:
        """Refuse what a folder would pass over.

        Raises:
            ConfigError: A `CheckpointIO` of the user's, or options for it.
        """
        plugin = type(self.checkpoint_io).__name__
        if storage_options is not None or not isinstance(self.checkpoint_io, CheckpointFiles):
            raise ConfigError(
                f"checkpoint_format='sharded' lets each rank write its part of a folder, without a "
                f"CheckpointIO, got {plugin} and storage_options={storage_options!r}, expected "
                f"neither. Leave them out, or use checkpoint_format='full'."
            )

    def _save_folder(self, checkpoint: Mapping[str, Any], filepath: Any, *, alone: bool) -> None:
        """Write a folder; each rank must call unless one has everything and is alone."""
        keeps = alone or self.is_global_zero
        meta = dict(checkpoint)
        state: dict[str, Any] = {}
        for number, optimizer_state in enumerate(meta.pop("optimizer_states", ())):
            own = self.optimizers[number]
            state[f"{_OPTIMIZER}{number}"] = named_state(optimizer_state, own, self._names())
        for name, value in checkpoint.items():
            if name in meta and _is_of_weights(name, value):
                state[name] = _own_entries(meta.pop(name), keeps=keeps)
        section = writable_section(meta)
        section["layout"], section["versions"] = self._layout(), self._versions()
        self._write_folder(filepath, state, meta if keeps else None, alone=alone)

    def _layout(self) -> dict[str, Any]:
        """Return what decides which rank has what."""
        mesh: Any = getattr(self, "mesh", None)
        return {
            "scheme": strategy_name(self),
            "ranks": self.world_size,
            "mesh": None if mesh is None else {**asdict(mesh), "axis_order": list(mesh.axis_order)},
        }

    def _versions(self) -> dict[str, str]:
        return {"torch": str(torch.__version__), "lightning": _LIGHTNING}

    def _load_folder(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        """Return a folder's checkpoint; where nobody looks at its tensors, they are not read."""
        verify_share(path, self.global_rank, self.world_size)
        folder = StoredFolder(path, weights_only)
        weights = next((root for root in WEIGHTS if root in folder.roots), WEIGHTS[0])
        checkpoint = {**_NOTHING_KEPT, **folder.meta(), "state_dict": folder.nested(weights)}
        others = [root for root in folder.roots if root != weights]
        states = sorted(
            (root for root in others if root.startswith(_OPTIMIZER)),
            key=lambda root: int(root.removeprefix(_OPTIMIZER)),
        )
        if states:
            checkpoint["optimizer_states"] = [
                {"state": {}, "param_groups": [], **folder.nested(root)} for root in states
            ]
        for root in others:
            if root not in states:
                checkpoint[root] = read_all(folder.nested(root))
        if not self._reads_boxes():
            checkpoint["state_dict"] = read_all(checkpoint["state_dict"])
        return checkpoint

    def _reads_boxes(self) -> bool:
        """Whether nobody but us looks at what is loaded."""
        module = self.lightning_module
        if module is None or self._engine is not None or not loads_plainly(module):
            return False
        callbacks: list[Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
        return type(module).on_load_checkpoint is CheckpointHooks.on_load_checkpoint and all(
            type(one).on_load_checkpoint is Callback.on_load_checkpoint for one in callbacks
        )

    def _take_stored(
        self, state: Mapping[str, Any], *, strict: bool, left_out: Container[str]
    ) -> ModuleSnapshot:
        """Check stored weights against the module, load the rest, and read the weights later."""
        module = self.lightning_module
        assert module is not None
        found = weight_misfits(module, state, strict=strict, left_out=left_out)
        error = misfit_error(type(module).__name__, found, WEIGHTS_ADVICE) if found else None
        agree_on_misfit(self._present_collectives, error)
        before = ModuleSnapshot(module, with_parameters=False)
        load_rest(module, state)
        self._stored_weights = state
        return before

    def _read_stored_weights(self) -> None:
        """Read the weights that a checkpoint has promised, where there is one; each rank must."""
        if self._stored_weights is not None:
            assert self.lightning_module is not None
            assert self._engine is not None
            read_weights(self.lightning_module, self._stored_weights, self._engine)
            self._stored_weights = None

    def _local_optimizer_state(
        self, state: Mapping[str, Any], optimizer: Optimizer
    ) -> dict[str, Any]:
        """Return this rank's shards of an optimizer's state, full or stored."""
        assert self._engine is not None
        numbered = numbered_state(state, optimizer, self._names())
        if has_stored(numbered):
            return local_optimizer_state(numbered, optimizer, self._engine)
        return local_state_dict(numbered, optimizer, self._engine)

    def _checked_names(self, states: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[str]]:
        """Return states by number, without elements, and the misfits of the names in them."""
        if len(states) != len(self.optimizers):
            return placeholders(states), []
        names, pairs = self._names(), list(zip(states, self.optimizers, strict=True))
        found = [misfit for pair in pairs for misfit in name_misfits(*pair, names)]
        if found:
            return [], found
        return placeholders([numbered_state(*pair, names) for pair in pairs]), []


def is_stored(state: Mapping[str, Any]) -> bool:
    """Whether weights are in a folder, and were not read."""
    return any(isinstance(value, StoredTensor) for value in state.values())


def is_folder(filepath: Any) -> bool:
    """Whether a checkpoint is a folder, as those of the sharded format are."""
    return Path(filepath).is_dir()


def _is_of_weights(name: str, value: Any) -> bool:
    """Whether an entry of a checkpoint goes to the folder beside meta.pt."""
    if name == "state_dict":
        return True
    return isinstance(value, Mapping) and any(
        isinstance(one, BoxedTensor) for one in value.values()
    )


def _own_entries(entries: Mapping[str, Any], *, keeps: bool) -> dict[str, Any]:
    """Return what this rank writes of weights: its boxes, and on one rank the rest."""
    return {
        name: value for name, value in entries.items() if keeps or isinstance(value, BoxedTensor)
    }
