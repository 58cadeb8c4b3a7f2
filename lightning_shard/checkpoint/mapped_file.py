"""A checkpoint file in a run: mapped into memory, and checked by the ranks that see it together.

    weights, optimizers' states,       mapped: a rank reads what it needs, and copies it
    what other ranks have kept
    everything else                    copied, since whoever is given it may keep it

So a rank holds no copy of the file, and ranks that see the same file read it once between them. A
file on each host's own disk is read once on each. Whoever looks at the whole checkpoint (a hook)
gets ordinary tensors instead, see `CheckpointFiles.load_checkpoint`.
"""

import copy
import os
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.by_rank import entries_of_ranks
from lightning_shard.checkpoint.files.archive_check import ALL, Share
from lightning_shard.checkpoint.files.parts import home
from lightning_shard.checkpoint.files.places import local_path
from lightning_shard.checkpoint.files.reading import read_mapped
from lightning_shard.checkpoint.section import CHECKPOINT_KEY


def load_mapped(
    path: Any,
    weights_only: bool | None,
    module: nn.Module,
    collectives: Collectives | None,
    rank: int,
) -> Any:
    """Load a checkpoint for a run, of which a rank reads what it needs, when it does.

    Args:
        path: Local, or any path of fsspec's.
        weights_only: As for `torch.load`.
        module: The module that takes the weights up by torch's own code.
        collectives: Group of the ranks that load the file together, each of which must call; None
            where this rank checks all of it by itself.
        rank: The rank whose own entry is kept.

    Raises:
        CheckpointError: The file is missing or no checkpoint, or damaged in this rank's share.
    """
    loaded = load_together(path, weights_only, collectives)
    if isinstance(loaded, dict):
        _copy_what_may_stay(loaded, module, f"rank_{rank}")
    return loaded


def load_together(path: Any, weights_only: bool | None, collectives: Collectives | None) -> Any:
    """Load a checkpoint file whose tensors are mapped: who keeps one must copy it.

    Args:
        path: As for `load_mapped`.
        weights_only: As for `torch.load`.
        collectives: As for `load_mapped`.

    Raises:
        CheckpointError: As for `load_mapped`.
    """
    return read_mapped(path, weights_only, share=_share_of(path, collectives))


def _share_of(path: Any, collectives: Collectives | None) -> Share:
    """Return what is checked here of a file that other ranks may see, too."""
    if collectives is None or collectives.size == 1:
        return ALL
    seen = collectives.all_gather_object(_identity(path))
    mine = seen[collectives.rank]
    if mine is None:
        return ALL
    ranks = [rank for rank, one in enumerate(seen) if one == mine]
    return Share(ranks.index(collectives.rank), len(ranks))


def _identity(path: Any) -> tuple[Any, ...] | None:
    """Return what is equal where two ranks see the same file of the same host."""
    place = local_path(path)
    if place is None:
        return None
    try:
        found = os.stat(place)
    except OSError:
        return None
    return home(), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _copy_what_may_stay(checkpoint: dict[str, Any], module: nn.Module, own: str) -> None:
    state = module.state_dict(keep_vars=True)
    params = [name for name, value in state.items() if isinstance(value, nn.Parameter)]
    section = checkpoint.get(CHECKPOINT_KEY)
    others = [name for name, _ in entries_of_ranks(section or {}) if name != own]
    _copy_all_but(checkpoint, ("state_dict", "optimizer_states", CHECKPOINT_KEY))
    _copy_all_but(checkpoint.get("state_dict"), params)
    _copy_all_but(section, others)


def _copy_all_but(entries: Any, mapped: Collection[str]) -> None:
    """Replace tensors by copies, in place: torch's own mapping knows module versions."""
    if not isinstance(entries, Mapping):
        return
    left: Any = entries
    for name in set(entries) - set(mapped):
        left[name] = in_own_memory(entries[name])


def in_own_memory(nested: Any) -> Any:
    """Return nested containers with copies of the tensors in them, which are mapped."""
    return tree_map_only(Tensor, _copy, nested)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone() if type(tensor) is Tensor else copy.deepcopy(tensor)
