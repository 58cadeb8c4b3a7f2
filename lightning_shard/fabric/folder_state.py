"""Where the objects of a state are in a folder of the sharded format, which is a Trainer's.

    folder                            what the user's key has in meta.pt
    state_dict.<name>                 {"lightning_shard": "weights", "prefix": ""}
    optimizer_0.state.<name>.<key>    {"lightning_shard": "optimizer", "number": 0, "prefix": ""}

Of one module the names are its own; of several, the keys of the state go before them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.section import CHECKPOINT_KEY
from lightning_shard.data_parallel.engine import DataParallelEngine
from lightning_shard.fabric.sharded_module import HeldModule
from lightning_shard.mesh import ParallelMesh

_KIND = CHECKPOINT_KEY  # the key by which an entry of meta.pt is known to stand for another
_USERS = "fabric_keys"  # in the section


class NamesInFolder:
    """The names of modules' parameters in a folder.

    Args:
        prefixes: By module, what goes before its names.
    """

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


@dataclass(frozen=True)
class FolderRun:
    """A save of Fabric's, as `RunFolders` knows a run.

    Attributes:
        collectives: Group of all ranks.
        lightning_module: Has the names of the parameters.
        optimizers: The optimizers, in the order of their numbers.
        root_device: This rank's device.
        present_engine: None: states are boxes already.
    """

    collectives: Collectives
    lightning_module: Any
    optimizers: Sequence[Optimizer]
    root_device: torch.device
    present_engine: DataParallelEngine | None = None

    @property
    def present_collectives(self) -> Collectives:
        """The group of all ranks."""
        return self.collectives

    @property
    def mesh(self) -> ParallelMesh:
        """All ranks are data parallel."""
        return ParallelMesh(dp=self.collectives.size)

    @property
    def mesh_rank(self) -> int:
        """Number of this rank."""
        return self.collectives.rank

    @property
    def mesh_size(self) -> int:
        """Number of ranks."""
        return self.collectives.size


def weights_at(prefix: str) -> dict[str, Any]:
    """Return what stands in meta.pt for a module's weights."""
    return {_KIND: "weights", "prefix": prefix}


def optimizer_at(number: int, prefix: str) -> dict[str, Any]:
    """Return what stands in meta.pt for an optimizer's state."""
    return {_KIND: "optimizer", "number": number, "prefix": prefix}


def users_section(keys: Sequence[str]) -> dict[str, Any]:
    """Return the section of a folder that Fabric has saved, with the keys of the user's state."""
    return {_USERS: list(keys)}


def users_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a folder's checkpoint as the user's state, with stored tensors; a Trainer's as it is.

    Args:
        checkpoint: Lightning's checkpoint, as a folder has it.
    """
    keys = (checkpoint.get(CHECKPOINT_KEY) or {}).get(_USERS)
    if keys is None:
        return dict(checkpoint)
    return {key: _found(checkpoint[key], checkpoint) for key in keys}


def _found(value: Any, checkpoint: Mapping[str, Any]) -> Any:
    """Exchange what stands for weights and states for them."""
    if isinstance(value, (list, tuple)):
        return type(value)(_found(one, checkpoint) for one in value) if _plain(value) else value
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
    """Return an optimizer's state by the own names of the module that a folder names by a prefix.

    States by number stay as they are.
    """

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


def _plain(value: Any) -> bool:
    return type(value) in (list, tuple)
