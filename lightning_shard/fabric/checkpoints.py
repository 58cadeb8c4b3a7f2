"""`fabric.save` and `fabric.load`: a state of modules, optimizers and whatever else, and back.

    {"model": model, "optimizer": optimizer, "step": 3}
      full      one file with full states as a single device writes it; rank 0 gathers
      sharded   a folder to which each rank writes its shards, and `meta.pt` for the rest

Either is loaded, whatever the format that is set. A folder is a Trainer's as well; see
`folder_state`. A module takes all of its weights, or none.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from lightning.fabric.plugins import CheckpointIO
from torch import nn
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.async_save.background_saves import BackgroundSaves
from lightning_shard.checkpoint.full import full_module_state
from lightning_shard.checkpoint.optimizer_state import full_state_dict
from lightning_shard.checkpoint.resuming import failing_together
from lightning_shard.checkpoint.run_folders import RunFolders
from lightning_shard.checkpoint.section import CHECKPOINT_KEY
from lightning_shard.checkpoint.sharded.run_state import module_boxes, optimizer_boxes
from lightning_shard.checkpoint.streamed import StreamedState
from lightning_shard.checkpoint.streamed_file import StreamedFile
from lightning_shard.checkpoint.user_shards import join_shards
from lightning_shard.errors import ConfigError
from lightning_shard.fabric.folder_state import (
    FolderRun,
    NamesInFolder,
    optimizer_at,
    users_section,
    weights_at,
)
from lightning_shard.fabric.sharded_module import HeldModule, ShardedModule
from lightning_shard.fabric.state_tree import NamedModules, Path, converted, objects_in
from lightning_shard.strategies.checkpoint_files import CheckpointFiles
from lightning_shard.strategies.options import CheckpointFormat

Filter = Mapping[str, Callable[[str, Any], bool]]


class FabricRun(Protocol):
    """What saving and loading asks of a strategy of Fabric."""

    checkpoint_format: CheckpointFormat

    @property
    def collectives(self) -> Collectives:
        """Group of all ranks."""

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes and reads files."""

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""

    @property
    def held(self) -> Sequence[HeldModule]:
        """The modules that are set up."""

    @property
    def scheme(self) -> str:
        """Name of the strategy, which a folder tells."""


class HeldObjects:
    """Knows which modules and optimizers of a state are in shards.

    Args:
        run: The Fabric's strategy.
    """

    def __init__(self, run: FabricRun) -> None:
        self._run = run

    def of_module(self, module: Any) -> HeldModule | None:
        """Return what holds a module that is set up; None for any other."""
        if isinstance(module, ShardedModule):
            return module.held if module.held.engine is not None else None
        known = (one for one in self._run.held if one.module is module)
        return next((one for one in known if one.engine is not None), None)

    def of_optimizer(self, optimizer: Any) -> HeldModule | None:
        """Return what holds the parameters of an optimizer that is set up; None for any other."""
        return next((one for one in self._run.held if one.state_of(optimizer)), None)

    def of(self, value: Any) -> HeldModule | None:
        """Return what holds a module or the parameters of an optimizer; None for any other."""
        if isinstance(value, nn.Module):
            return self.of_module(value)
        return self.of_optimizer(value) if isinstance(value, Optimizer) else None

    def full_state(self, value: Any) -> Any:
        """Return the state of an object, full on rank 0; each rank must call."""
        held = self.of(value)
        if held is None:
            module = value.module if isinstance(value, ShardedModule) else value
            return module.state_dict()
        engine = held.present_engine
        with engine.user_code.running(False):
            if isinstance(value, Optimizer):
                return full_state_dict(value, engine)
            return full_module_state(held.module, engine)


class Saving:
    """Saves one state; each rank must make one and call `save`.

    Args:
        run: The Fabric's strategy.
        state: The user's state, with unwrapped objects.
    """

    def __init__(self, run: FabricRun, state: Mapping[str, Any]) -> None:
        self._run, self._state = run, state
        self._held = HeldObjects(run)
        self._objects = list(objects_in(state))

    def save(self, path: Any, options: Any, chosen: Filter) -> None:
        """Write the state.

        Args:
            path: The file or folder; rank 0's counts.
            options: For the `CheckpointIO`.
            chosen: By key, which entries of its state are saved.

        Raises:
            CheckpointError: It could not be written; on every rank.
            ConfigError: A folder was asked for, and what only a file can be.
        """
        path = self._run.collectives.broadcast_object(path)
        is_folder = self._run.checkpoint_format == "sharded"
        if is_folder:
            self._check_writer(options, chosen)
        with failing_together(self._run.collectives):
            if is_folder:
                self._save_folder(path)
            elif streamed := self._streamed(file := StreamedFile(), chosen):
                self._save_streamed(file, streamed, path, options)
            else:
                self._save_gathered(path, options, chosen)

    def _save_gathered(self, path: Any, options: Any, chosen: Filter) -> None:
        full = self._joined(converted(self._state, lambda _, one: self._full(one)))
        if self._run.collectives.rank == 0:
            full = {key: _filtered(chosen.get(key), one) for key, one in full.items()}
            self._run.checkpoint_io.save_checkpoint(full, path, options)

    def _full(self, value: Any) -> Any:
        return merged(value, self._held.full_state)

    def _streamed(self, file: StreamedFile, chosen: Filter) -> dict[HeldModule, StreamedState]:
        """Return what writes each module's state as it comes; {} where rank 0 has to gather."""
        if chosen or type(self._run.checkpoint_io) is not CheckpointFiles:
            return {}
        held = dict.fromkeys(one for _, value in self._objects if (one := self._held.of(value)))
        if all(one.present_engine.options.stage == 0 for one in held):
            return {}
        return {
            one: StreamedState(one.present_engine, file, number=number)
            for number, one in enumerate(held)
        }

    def _save_streamed(
        self,
        file: StreamedFile,
        streamed: Mapping[HeldModule, StreamedState],
        path: Any,
        options: Any,
    ) -> None:
        def awaited(value: Any) -> Any:
            held = self._held.of(value)
            if held is None:
                return self._held.full_state(value)
            with held.present_engine.user_code.running(False):
                if isinstance(value, Optimizer):
                    return streamed[held].optimizer_state(value)
                return streamed[held].module_state(held.module)

        files = self._run.checkpoint_io
        assert isinstance(files, CheckpointFiles)
        full = self._joined(converted(self._state, lambda _, one: merged(one, awaited)))
        try:
            if self._run.collectives.rank == 0:
                files.save_records(file.records(full), path, options)
        finally:
            file.finish()

    def _joined(self, full: dict[str, Any]) -> dict[str, Any]:
        """Exchange shards among the user's own values for full tensors; each rank must call."""
        for held in self._run.held:
            engine = held.engine
            if engine is not None and engine.options.stage == 3:
                with engine.user_code.running(False):
                    join_shards(full, engine)
        return full

    # --- folders ----------------------------------------------------------------------------------

    def _check_writer(self, options: Any, chosen: Filter) -> None:
        plugin = self._run.checkpoint_io
        if options is not None or chosen or not isinstance(plugin, CheckpointFiles):
            raise ConfigError(
                f"checkpoint_format='sharded' lets each rank write its part of a folder, without a "
                f"CheckpointIO and without a filter, got {type(plugin).__name__}, "
                f"storage_options={options!r} and a filter of {sorted(chosen) or 'nothing'}. Leave "
                f"them out, or use checkpoint_format='full'."
            )

    def _save_folder(self, path: Any) -> None:
        names = NamesInFolder(self._prefixes())
        weights: dict[str, Any] = {}
        for held, prefix in names.prefixes.items():
            with held.present_engine.user_code.running(False):
                boxes = module_boxes(held.module, held.present_engine)
            weights |= {prefix + name: value for name, value in boxes.items()}
        optimizers = [one for _, one in self._objects if self._held.of_optimizer(one) is not None]
        states = [self._boxes(one, names) for one in optimizers]
        places = self._places(names, optimizers)
        rest = self._joined(converted(self._state, lambda _, one: places(one)))
        rest[CHECKPOINT_KEY] = users_section(list(self._state))
        run = self._run
        RunFolders(BackgroundSaves()).save(
            FolderRun(run.collectives, names, optimizers, run.root_device),
            {**rest, "state_dict": weights, "optimizer_states": states},
            path,
            scheme=run.scheme,
            alone=False,
            step=None,
        )

    def _prefixes(self) -> dict[HeldModule, str]:
        """Return what goes before the names of each module; see `NamedModules`."""
        found = [(path, held) for path, one in self._objects if (held := self._held.of_module(one))]
        parts = {
            held: f"{name}."
            for one in self._state.values()
            if isinstance(one, NamedModules)
            for name, module in one.items()
            if (held := self._held.of_module(module)) is not None
        }
        alone = len({held for _, held in found}) == 1
        return {
            held: parts.get(held, "" if alone else ".".join(map(str, path)) + ".")
            for path, held in found
        }

    def _boxes(self, optimizer: Optimizer, names: NamesInFolder) -> dict[str, Any]:
        held = self._held.of_optimizer(optimizer)
        assert held is not None
        with held.present_engine.user_code.running(False):
            return optimizer_boxes(optimizer, names.parameters, held.present_engine)

    def _places(
        self, names: NamesInFolder, optimizers: Sequence[Optimizer]
    ) -> Callable[[Any], Any]:
        """Return what gives the entry of an object in meta.pt."""

        def place(value: Any) -> Any:
            if isinstance(value, NamedModules):
                return weights_at("")
            held = self._held.of(value)
            if held is None:
                return self._held.full_state(value)
            if isinstance(value, Optimizer):
                return optimizer_at(optimizers.index(value), names.prefixes.get(held, ""))
            return weights_at(names.prefixes[held])

        return place


def merged(value: Any, state_of: Callable[[Any], Any]) -> Any:
    """Return an object's state; of `NamedModules` that of a module which has them as its parts."""
    if not isinstance(value, NamedModules):
        return state_of(value)
    return {
        f"{part}.{name}": one
        for part, module in value.items()
        for name, one in state_of(module).items()
    }


def _filtered(keep: Callable[[str, Any], bool] | None, state: Any) -> Any:
    if keep is None or not isinstance(state, Mapping):
        return state
    return {key: value for key, value in state.items() if keep(key, value)}


__all__ = ["FabricRun", "HeldObjects", "Path", "Saving", "merged"]
