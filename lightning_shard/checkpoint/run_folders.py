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

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.background_saves import BackgroundSaves
from lightning_shard.checkpoint.full import ModuleSnapshot
from lightning_shard.checkpoint.misfits import weights_error
from lightning_shard.checkpoint.optimizer_state import local_state_dict
from lightning_shard.checkpoint.resuming import agree_on_misfit
from lightning_shard.checkpoint.section import writable_section
from lightning_shard.checkpoint.sharded import entries, run_state
from lightning_shard.checkpoint.sharded.folder import StoredFolder, StoredTensor
from lightning_shard.checkpoint.unread import has_unread
from lightning_shard.core.mesh import ParallelMesh
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.data_parallel.memory.inner_tensors import take_apart


@dataclass(frozen=True, kw_only=True)
class CheckpointedRun:
    """One rank's view of a run whose state is saved and loaded.

    Attributes:
        ranks: The group of all ranks; None where this rank asks nobody.
        engine: The engine; None before the strategy's setup and after teardown, and where states
            are boxes already.
        kept_besides: Returns what the scheme keeps on this rank; no communication, and no copies.
    """

    module: Any
    optimizers: Sequence[Optimizer]
    mesh: ParallelMesh
    rank: int
    device: torch.device
    ranks: Collectives | None
    engine: DataParallelEngine | None = None
    is_in_process: bool = False
    is_folder: bool = True
    dimensions: Sequence[Any] = ()
    kept_besides: Callable[[], Mapping[str, Any]] = dict


class RunFolders:
    """How one rank's part of a run's state goes to folders and back."""

    def __init__(self, saves: BackgroundSaves) -> None:
        self._saves = saves
        self._stored: Mapping[str, Any] | None = None  # weights, until there is an engine

    def save(
        self,
        run: CheckpointedRun,
        checkpoint: Mapping[str, Any],
        path: Any,
        *,
        scheme: str,
        alone: bool,
        step: int | None,
    ) -> None:
        """Write a folder, now or for `start`; each must call unless one alone has everything."""
        keeps = alone or run.rank == 0
        state, meta = entries.folder_entries(checkpoint, run.optimizers, names_of(run), keeps=keeps)
        section, mesh = writable_section(meta), run.mesh
        sizes = asdict(mesh)
        further = sizes.pop("others")
        axes = {**sizes, **further, "axis_order": list(mesh.axis_order)}
        section["layout"] = {"scheme": scheme, "ranks": mesh.world_size, "mesh": axes}
        lightning = checkpoint.get("pytorch-lightning_version", entries.lightning_version())
        section["versions"] = {"torch": str(torch.__version__), "lightning": lightning}
        group = None if alone else run.ranks
        self._saves.write(path, state, meta if keeps else None, group, step=step)

    def take_weights(
        self,
        run: CheckpointedRun,
        state: Mapping[str, Any],
        *,
        strict: bool,
        left_out: Container[str],
    ) -> ModuleSnapshot:
        """Check stored weights, load what is read at once, and return the module before."""
        module = run.module
        take_apart(module)  # a folder has inner tensors, as the run that reads them
        found = run_state.weight_misfits(module, state, strict=strict, left_out=left_out)
        agree_on_misfit(run.ranks, weights_error(module, found))
        before = ModuleSnapshot(module, with_parameters=False)
        run_state.load_rest(module, state)
        self._stored = state
        return before

    def read_weights(self, run: CheckpointedRun) -> None:
        """Read the weights that a checkpoint has promised, where there is one; each rank must."""
        if self._stored is not None:
            assert run.engine is not None
            run_state.read_weights(run.module, self._stored, run.engine)
            self._stored = None

    def tear_down(self) -> None:
        """Forget weights that were not read."""
        self._stored = None


def load_folder(
    run: CheckpointedRun, path: Any, weights_only: bool | None, *, in_full: bool
) -> dict[str, Any]:
    """Return a folder's checkpoint without optimizers' states, and `in_full` with full weights."""
    folder = StoredFolder(path, weights_only)
    folder.verify_share(run.rank, run.mesh.world_size)
    return entries.checkpoint_of(folder, in_full=in_full)


def names_of(run: CheckpointedRun) -> dict[nn.Parameter, str]:
    """Return the name of each parameter of the run's module."""
    return {param: name for name, param in run.module.named_parameters()}


def local_state(
    run: CheckpointedRun, state: Mapping[str, Any], optimizer: Optimizer
) -> dict[str, Any]:
    """Return this rank's shards of an optimizer's state, full or stored."""
    assert run.engine is not None
    numbered = entries.numbered_state(state, optimizer, names_of(run))
    if has_unread(numbered):
        return run_state.local_optimizer_state(numbered, optimizer, run.engine)
    return local_state_dict(numbered, optimizer, run.engine)


def checked_names(
    run: CheckpointedRun, states: Sequence[Mapping[str, Any]]
) -> tuple[list[Any], list[str]]:
    """Return states by number, without elements, and the misfits of the names in them."""
    if len(states) != len(run.optimizers):
        return run_state.placeholders(states), []
    names, pairs = names_of(run), list(zip(states, run.optimizers, strict=True))
    found = [misfit for pair in pairs for misfit in entries.name_misfits(*pair, names)]
    if found:
        return [], found
    return run_state.placeholders([entries.numbered_state(*pair, names) for pair in pairs]), []


def is_stored(state: Mapping[str, Any]) -> bool:
    """Whether weights are in a folder, and were not read."""
    return any(isinstance(value, StoredTensor) for value in state.values())
