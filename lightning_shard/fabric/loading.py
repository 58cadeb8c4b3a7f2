"""`fabric.load`: a file or a folder into the objects of a state; each rank must call.

First everything is read and what optimizers are to take is checked; then modules take their
weights, each all or none; then optimizers and the rest take theirs.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_shard.checkpoint.conversion.whole import whole_checkpoint
from lightning_shard.checkpoint.files.places import is_folder
from lightning_shard.checkpoint.full import load_into_shards, load_module_state
from lightning_shard.checkpoint.mapped_file import in_own_memory
from lightning_shard.checkpoint.misfits import WEIGHTS_ADVICE, misfit_error
from lightning_shard.checkpoint.optimizer_state import local_state_dict
from lightning_shard.checkpoint.resuming import agree_on_misfit, failing_together
from lightning_shard.checkpoint.run_folders import is_stored, load_folder
from lightning_shard.checkpoint.section import CHECKPOINT_KEY, section_of
from lightning_shard.checkpoint.sharded.folder import has_stored, read_all
from lightning_shard.checkpoint.sharded.load_hooks import loads_plainly
from lightning_shard.checkpoint.sharded.reading import (
    load_rest,
    local_optimizer_state,
    placeholders,
    read_weights,
    weight_misfits,
)
from lightning_shard.fabric._lightning import check_keys_are_there
from lightning_shard.fabric.checkpoints import FabricRun, HeldObjects
from lightning_shard.fabric.folder_state import FolderRun, part_of, users_state, without_prefix
from lightning_shard.fabric.sharded_module import HeldModule
from lightning_shard.fabric.state_tree import NamedModules, objects_in, paired
from lightning_shard.strategies.checkpoint_files import CheckpointFiles


class Loading:
    """Loads one file or folder; each rank must make one, and call.

    Args:
        run: The Fabric's strategy.
        path: The file or folder; rank 0's counts.
        weights_only: As for `torch.load`.
    """

    def __init__(self, run: FabricRun, path: Any, weights_only: bool | None) -> None:
        self._run, self._weights_only = run, weights_only
        self._is_mapped = False  # what was loaded: what somebody keeps must be copied
        self._held = HeldObjects(run)
        self._path = run.collectives.broadcast_object(path)

    def whole(self) -> dict[str, Any]:
        """Return all that there is, full, under the user's keys."""
        with failing_together(self._run.collectives):
            if not is_folder(self._path):
                return self._file()
            state = users_state(whole_checkpoint(self._path, "cpu", self._weights_only))
        state.pop(CHECKPOINT_KEY, None)
        return state

    def into_object(self, target: Any, *, strict: bool) -> None:
        """Load a file that is the state of one module or optimizer."""
        with failing_together(self._run.collectives):
            saved = self._read()
        if is_folder(self._path) and isinstance(target, nn.Module):
            saved = saved.get("state_dict", saved)
        self._load([(target, saved)], strict=strict)

    def into(self, state: dict[str, Any], *, strict: bool) -> dict[str, Any]:
        """Load into a state's objects and values, in place; return what was not asked for."""
        with failing_together(self._run.collectives):
            saved = self._read()
        section_of(saved)  # raises for a newer format
        check_keys_are_there(state.keys(), saved.keys(), strict=strict)
        known = {key: one for key, one in state.items() if key in saved}
        pairs = [pair for key, one in known.items() for pair in paired(one, saved[key], (key,))]
        self._load(pairs, strict=strict)
        for key, one in known.items():
            value = saved.pop(key)
            if next(objects_in(one), None) is None:
                state[key] = self._to_keep(value)
        saved.pop(CHECKPOINT_KEY, None)
        return {key: self._to_keep(one) for key, one in saved.items()}

    def _read(self) -> dict[str, Any]:
        if not is_folder(self._path):
            files = self._run.checkpoint_io
            if type(files) is not CheckpointFiles:
                return self._file()
            self._is_mapped = True
            return files.load_together(self._path, self._weights_only, self._run.collectives)
        collectives = self._run.collectives
        run = FolderRun(collectives, None, (), self._run.root_device)
        return users_state(load_folder(run, self._path, self._weights_only, in_full=False))

    def _to_keep(self, value: Any) -> Any:
        """Return what was loaded for whoever may hold on to it: read, and in memory of its own."""
        if self._is_mapped:
            return in_own_memory(value)
        return read_all(value) if has_stored(value) else value

    def _file(self) -> dict[str, Any]:
        return self._run.checkpoint_io.load_checkpoint(self._path, weights_only=self._weights_only)

    def _load(self, pairs: list[tuple[Any, Any]], *, strict: bool) -> None:
        parts = {
            held: f"{name}."
            for one, _ in pairs
            if isinstance(one, NamedModules)
            for name, module in one.items()
            if (held := self._held.of_module(module)) is not None
        }
        numbered = [self._checked(*pair, parts) for pair in pairs]
        for target, saved in pairs:
            if isinstance(target, NamedModules):
                for name, module in target.items():
                    self._load_module(module, part_of(saved, f"{name}."), strict=strict)
            elif isinstance(target, nn.Module):
                self._load_module(target, saved, strict=strict)
        for (target, saved), state in zip(pairs, numbered, strict=True):
            if isinstance(target, Optimizer):
                self._load_optimizer(target, state)
            elif not isinstance(target, (nn.Module, NamedModules)):
                target.load_state_dict(self._to_keep(saved))

    def _checked(self, target: Any, saved: Any, parts: Mapping[HeldModule, str]) -> Any:
        """Return an optimizer's state by number, which fits; anything else as it is."""
        held = self._held.of_optimizer(target) if isinstance(target, Optimizer) else None
        states = None if held is None else held.state_of(target)
        if held is None or states is None:
            return saved
        return states.checked(without_prefix(saved, parts.get(held, "")), placeholders)

    def _load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        held = self._held.of_optimizer(optimizer)
        states = None if held is None else held.state_of(optimizer)
        if held is None or states is None:
            optimizer.load_state_dict(self._to_keep(dict(state)))
            return
        engine = held.present_engine
        with engine.user_code.running(False):
            read = local_optimizer_state if has_stored(state) else local_state_dict
            states.load(read(state, optimizer, engine))

    def _load_module(self, target: nn.Module, saved: Mapping[str, Any], *, strict: bool) -> None:
        held = self._held.of_module(target)
        agree = partial(agree_on_misfit, self._run.collectives)
        if held is None:
            full = saved if self._is_mapped and loads_plainly(target) else self._to_keep(saved)
            load_module_state(target, full, strict=strict, agree=agree)
        elif held.loads_plainly and (is_stored(saved) or self._is_mapped):
            self._load_shards(held, saved, strict=strict)
        else:
            engine, full = held.present_engine, self._to_keep(saved)
            with engine.user_code.running(False), engine.optimizer_view(), held.loading_plainly():
                load_module_state(held.module, full, strict=strict, engine=engine, agree=agree)

    def _load_shards(self, held: HeldModule, saved: Mapping[str, Any], *, strict: bool) -> None:
        """Let each rank read what it has of a module from a folder, or a mapped file."""
        module, engine = held.module, held.present_engine
        found = weight_misfits(module, saved, strict=strict)
        error = misfit_error(type(module).__name__, found, WEIGHTS_ADVICE) if found else None
        agree_on_misfit(self._run.collectives, error)
        with engine.user_code.running(False), torch.no_grad(), held.loading_plainly():
            load_rest(module, saved)
            load = read_weights if is_stored(saved) else load_into_shards
            load(module, saved, engine)
