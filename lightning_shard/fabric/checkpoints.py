"""`fabric.save` and `fabric.load`: a tree of mappings and lists with objects that have a state.

    {"nets": [generator, discriminator], "optimizer": optimizer, "step": 3}
      full      one file with full states as a single device writes it; rank 0 gathers
      sharded   a folder to which each rank writes its shards, and `meta.pt` for the rest

Either is loaded, whatever the format that is set, and a folder is a Trainer's as well. Each rank
must call both. In a load everything is read and checked for the optimizers before modules take
their weights, each all or none; then optimizers and the rest take theirs.

    folder                            what the user's key has in meta.pt
    state_dict.<name>                 {"lightning_shard": "weights", "prefix": ""}
    optimizer_0.state.<name>.<key>    {"lightning_shard": "optimizer", "number": 0, "prefix": ""}

Of one module the names are its own; of several, the keys of the state go before them.

A state for `fabric.save` from which a Trainer resumes, and into which its checkpoints load.

    state = trainer_checkpoint(model, optimizer, scheduler, global_step=100, batch=100)
    fabric.save("last.ckpt", state)          trainer.fit(module, ckpt_path="last.ckpt")
    fabric.load("trainers.ckpt", state)      state["global_step"], state["epoch"]

The keys are those of Lightning's checkpoints. A loop of the user's counts its steps by itself; what
a Trainer has to know of them, its loops' progress, Lightning's own loops say, told three numbers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from torch import nn
from torch.optim import Optimizer

from lightning_shard.checkpoint.background_saves import BackgroundSaves
from lightning_shard.checkpoint.conversion.source import whole_checkpoint
from lightning_shard.checkpoint.files.places import is_folder
from lightning_shard.checkpoint.full import (
    full_module_state,
    join_shards,
    load_into_shards,
    load_module_state,
)
from lightning_shard.checkpoint.misfits import weights_error
from lightning_shard.checkpoint.optimizer_state import full_state_dict, local_state_dict
from lightning_shard.checkpoint.resuming import agree_on_misfit, failing_together
from lightning_shard.checkpoint.run_folders import (
    CheckpointedRun,
    RunFolders,
    is_stored,
    load_folder,
)
from lightning_shard.checkpoint.section import CHECKPOINT_KEY, section_of
from lightning_shard.checkpoint.sharded import run_state
from lightning_shard.checkpoint.sharded.entries import lightning_version
from lightning_shard.checkpoint.sharded.folder import read_all
from lightning_shard.checkpoint.streamed import StreamedFile, StreamedState
from lightning_shard.checkpoint.unread import has_unread
from lightning_shard.core.mesh import ParallelMesh
from lightning_shard.errors import CheckpointError
from lightning_shard.fabric._lightning import check_keys_are_there, progress_after
from lightning_shard.fabric.sharded_module import HeldModule, ShardedModule
from lightning_shard.strategies.checkpoint_files import (
    CheckpointFiles,
    check_folder_writer,
    in_own_memory,
)
from lightning_shard.strategies.names import strategy_name

Path = tuple[Any, ...]


class NamedModules(dict[str, nn.Module]):
    """Modules that are saved as one: the parts, by name, of a module that is not here.

    {"generator": generator, "discriminator": discriminator} is saved as the weights of a module
    that has both under these names, such as a `LightningModule`.
    """


def has_state(value: Any) -> bool:
    """Whether an object, no class, has a state to be saved: a module, an optimizer ..."""
    is_class = isinstance(value, type)
    return not is_class and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def objects_in(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield each object with a state, and its path: keys and indices."""
    if has_state(tree):
        yield path, tree
        return
    entries: Any = ()
    if isinstance(tree, Mapping):
        entries = tree.items()
    elif isinstance(tree, (list, tuple)):
        entries = enumerate(tree)
    for key, value in entries:
        yield from objects_in(value, (*path, key))


def converted(tree: Any, convert: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return the tree with what `convert` makes of each object, and of each `NamedModules`."""
    if isinstance(tree, NamedModules) or has_state(tree):
        return convert(path, tree)
    if next(objects_in(tree), None) is None:
        return tree
    if isinstance(tree, Mapping):
        return {key: converted(value, convert, (*path, key)) for key, value in tree.items()}
    return [converted(value, convert, (*path, number)) for number, value in enumerate(tree)]


def paired(own: Any, saved: Any, path: Path = ()) -> Iterator[tuple[Any, Any]]:
    """Yield each object of a tree (or `NamedModules`) with what was saved of it."""
    if isinstance(own, NamedModules) or has_state(own):
        yield own, saved
        return
    if next(objects_in(own), None) is None:
        return
    is_mapping = isinstance(own, Mapping)
    alike = isinstance(saved, Mapping if is_mapping else (list, tuple))
    keys = list(own) if is_mapping else list(range(len(own)))
    theirs = (list(saved) if is_mapping else list(range(len(saved)))) if alike else []
    if not alike or not set(keys) <= set(theirs) or (not is_mapping and len(keys) != len(theirs)):
        where = ".".join(map(str, path)) or "the state"
        raise CheckpointError(
            f"The checkpoint has a {type(saved).__name__} with {theirs or 'no entries'} at "
            f"{where!r}, expected entries for {keys}. Load with the objects that it was saved with."
        )
    for key in keys:
        yield from paired(own[key], saved[key], (*path, key))


_KIND = CHECKPOINT_KEY  # the key by which an entry of meta.pt is known to stand for another
_USERS = "fabric_keys"  # in the section
Filter = Mapping[str, Callable[[str, Any], bool]]


class NamesInFolder:
    """The names of modules' parameters in a folder."""

    def __init__(self, prefixes: Mapping[HeldModule, str]) -> None:
        self.prefixes = prefixes
        self.parameters = {
            param: prefix + name
            for held, prefix in prefixes.items()
            for name, param in held.module.named_parameters()
        }

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter with its name in the folder, as a module does."""
        return ((name, param) for param, name in self.parameters.items())


def folder_run(run: Any, module: Any, optimizers: Sequence[Optimizer]) -> CheckpointedRun:
    """Return Fabric's save or load, as `RunFolders` knows a run: all ranks are data parallel."""
    ranks = run.collectives
    return CheckpointedRun(
        module=module,
        optimizers=optimizers,
        mesh=ParallelMesh(dp=ranks.size),
        rank=ranks.rank,
        device=run.root_device,
        ranks=ranks,
    )


def users_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a folder's checkpoint as the user's state, with stored tensors."""
    keys = (checkpoint.get(CHECKPOINT_KEY) or {}).get(_USERS)
    if keys is None:
        return dict(checkpoint)
    return {key: _found(checkpoint[key], checkpoint) for key in keys}


def _found(value: Any, checkpoint: Mapping[str, Any]) -> Any:
    """Exchange what stands for weights and states for them."""
    if type(value) in (list, tuple):
        return type(value)(_found(one, checkpoint) for one in value)
    if not isinstance(value, Mapping):
        return value
    kind = value.get(_KIND)
    if kind == "weights":
        return part_of(checkpoint["state_dict"], value["prefix"])
    if kind == "optimizer":
        return without_prefix(checkpoint["optimizer_states"][value["number"]], value["prefix"])
    return {key: _found(one, checkpoint) for key, one in value.items()}


def part_of(weights: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the weights of one part of a module, by its own names."""
    return {
        name.removeprefix(prefix): one for name, one in weights.items() if name.startswith(prefix)
    }


def without_prefix(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return an optimizer's state by the own names of a module that a folder names by a prefix."""

    def own(name: Any) -> Any:
        return name.removeprefix(prefix) if isinstance(name, str) else name

    return {
        **state,
        "state": {own(name): entries for name, entries in state.get("state", {}).items()},
        "param_groups": [
            {**group, "params": [own(name) for name in group["params"]]}
            for group in state.get("param_groups", ())
        ],
    }


class HeldObjects:
    """Knows which modules and optimizers of a state are in shards."""

    def __init__(self, run: Any) -> None:
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

    def parts_of(self, values: Iterable[Any]) -> dict[HeldModule, str]:
        """Return what goes before the names of modules that are saved as parts of one."""
        return {
            held: f"{name}."
            for one in values
            if isinstance(one, NamedModules)
            for name, module in one.items()
            if (held := self.of_module(module)) is not None
        }

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
    """Saves one state; each rank must make one and call `save`."""

    def __init__(self, run: Any, state: Mapping[str, Any]) -> None:
        self._run, self._state = run, state
        self._held = HeldObjects(run)
        self._objects = list(objects_in(state))

    def save(self, path: Any, options: Any, chosen: Filter) -> None:
        """Write the state to rank 0's path.

        Args:
            path: The file or folder; rank 0's counts.
            options: For the `CheckpointIO`.
            chosen: By key, which entries of its state are saved.
        """
        path = self._run.collectives.broadcast_object(path)
        is_folder = self._run.checkpoint_format == "sharded"
        if is_folder:
            check_folder_writer(self._run.checkpoint_io, options, chosen)
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
        is_first = self._run.collectives.rank == 0
        files.save_streamed(full, file, path, options, writes=is_first)

    def _joined(self, full: dict[str, Any]) -> dict[str, Any]:
        """Exchange shards among the user's own values for full tensors; each rank must call."""
        for held in self._run.held:
            engine = held.engine
            if engine is not None and engine.options.stage == 3:
                with engine.user_code.running(False):
                    join_shards(full, engine)
        return full

    # --- folders ----------------------------------------------------------------------------------

    def _save_folder(self, path: Any) -> None:
        names = NamesInFolder(self._prefixes())
        weights: dict[str, Any] = {}
        for held, prefix in names.prefixes.items():
            with held.present_engine.user_code.running(False):
                boxes = run_state.module_boxes(held.module, held.present_engine)
            weights |= {prefix + name: value for name, value in boxes.items()}
        optimizers = [one for _, one in self._objects if self._held.of_optimizer(one) is not None]
        states = [self._boxes(one, names) for one in optimizers]
        places = self._places(names, optimizers)
        rest = self._joined(converted(self._state, lambda _, one: places(one)))
        rest[CHECKPOINT_KEY] = {_USERS: list(self._state)}
        run = self._run
        RunFolders(BackgroundSaves()).save(
            folder_run(run, names, optimizers),
            {**rest, "state_dict": weights, "optimizer_states": states},
            path,
            scheme=strategy_name(run),
            alone=False,
            step=None,
        )

    def _prefixes(self) -> dict[HeldModule, str]:
        """Return what goes before the names of each module; see `NamedModules`."""
        found = [(path, held) for path, one in self._objects if (held := self._held.of_module(one))]
        parts = self._held.parts_of(self._state.values())
        alone = len({held for _, held in found}) == 1
        return {
            held: parts.get(held, "" if alone else ".".join(map(str, path)) + ".")
            for path, held in found
        }

    def _boxes(self, optimizer: Optimizer, names: NamesInFolder) -> dict[str, Any]:
        held = self._held.of_optimizer(optimizer)
        assert held is not None
        with held.present_engine.user_code.running(False):
            return run_state.optimizer_boxes(optimizer, names.parameters, held.present_engine)

    def _places(
        self, names: NamesInFolder, optimizers: Sequence[Optimizer]
    ) -> Callable[[Any], Any]:
        """Return what gives the entry of an object in meta.pt."""

        def place(value: Any) -> Any:
            if isinstance(value, NamedModules):
                return {_KIND: "weights", "prefix": ""}
            held = self._held.of(value)
            if held is None:
                return self._held.full_state(value)
            if isinstance(value, Optimizer):
                number, prefix = optimizers.index(value), names.prefixes.get(held, "")
                return {_KIND: "optimizer", "number": number, "prefix": prefix}
            return {_KIND: "weights", "prefix": names.prefixes[held]}

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


class Loading:
    """Loads one file or folder; each rank must make one, and call."""

    def __init__(self, run: Any, path: Any, weights_only: bool | None) -> None:
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
        run = folder_run(self._run, None, ())
        return users_state(load_folder(run, self._path, self._weights_only, in_full=False))

    def _to_keep(self, value: Any) -> Any:
        """Return what was loaded for whoever may hold on to it: read, and in memory of its own."""
        if self._is_mapped:
            return in_own_memory(value)
        return read_all(value) if has_unread(value) else value

    def _file(self) -> dict[str, Any]:
        files: CheckpointIO = self._run.checkpoint_io
        return files.load_checkpoint(self._path, weights_only=self._weights_only)

    def _load(self, pairs: list[tuple[Any, Any]], *, strict: bool) -> None:
        parts = self._held.parts_of(target for target, _ in pairs)
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
        return states.checked(without_prefix(saved, parts.get(held, "")), run_state.placeholders)

    def _load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        held = self._held.of_optimizer(optimizer)
        states = None if held is None else held.state_of(optimizer)
        if held is None or states is None:
            optimizer.load_state_dict(self._to_keep(dict(state)))
            return
        engine = held.present_engine
        with engine.user_code.running(False):
            read = run_state.local_optimizer_state if has_unread(state) else local_state_dict
            states.load(read(state, optimizer, engine))

    def _load_module(self, target: nn.Module, saved: Mapping[str, Any], *, strict: bool) -> None:
        held = self._held.of_module(target)
        agree = partial(agree_on_misfit, self._run.collectives)
        if held is None:
            full = (
                saved
                if self._is_mapped and run_state.loads_plainly(target)
                else self._to_keep(saved)
            )
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
        found = run_state.weight_misfits(module, saved, strict=strict)
        agree_on_misfit(self._run.collectives, weights_error(module, found))
        with engine.user_code.running(False), torch.no_grad(), held.loading_plainly():
            run_state.load_rest(module, saved)
            load = run_state.read_weights if is_stored(saved) else load_into_shards
            load(module, saved, engine)


def trainer_checkpoint(
    modules: nn.Module | Mapping[str, nn.Module],
    optimizers: Optimizer | Sequence[Optimizer] = (),
    schedulers: Any = (),
    *,
    global_step: int = 0,
    epoch: int = 0,
    batch: int = 0,
) -> dict[str, Any]:
    """Return a state with the keys of Lightning's checkpoints.

    Args:
        modules: The model; or by name the parts of a `LightningModule` that is not here.
        optimizers: Its optimizers, in the order of `configure_optimizers`.
        schedulers: Its learning rate schedulers, in that order.
        global_step: Optimizer steps so far, of all optimizers together.
        epoch: Epochs that are complete.
        batch: Batches of this epoch that are done; a Trainer goes on with the next one.

    Returns:
        The state; `fabric.load` fills it in place.
    """
    optimizers = _listed(optimizers)
    state: dict[str, Any] = {
        "epoch": epoch,
        "global_step": global_step,
        "pytorch-lightning_version": lightning_version(),
        "state_dict": NamedModules(modules) if isinstance(modules, Mapping) else modules,
        "loops": {"fit_loop": progress_after(global_step, len(optimizers), epoch, batch)},
        "callbacks": {},
        "optimizer_states": optimizers,
        "lr_schedulers": _listed(schedulers),
    }
    hparams = getattr(modules, "hparams", None)
    if hparams:
        state |= {"hparams_name": "kwargs", "hyper_parameters": dict(hparams)}
    return state


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
