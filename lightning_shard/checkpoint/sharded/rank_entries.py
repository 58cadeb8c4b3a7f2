"""What each rank keeps for itself, in a folder: written by that rank, and read by who needs it.

    lightning_shard.rank_1._entry                   the entry, with shapes in the place of tensors
    lightning_shard.rank_1.compression.residual.w   a tensor of it, whole

A rank on the same mesh goes on from its own tensors; on another one, each reads what it averages.
Who only looks at shapes reads no tensor.
"""

import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.checkpoint.by_rank import entries_of_ranks
from lightning_shard.checkpoint.section import CHECKPOINT_KEY
from lightning_shard.checkpoint.sharded.folder import StoredFolder, StoredTensor
from lightning_shard.checkpoint.unread import exchanged
from lightning_shard.errors import CheckpointError

_OUTLINE = "_entry"


def take_out_entries(section: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Take the entries of ranks out of a section; return tensors for a folder, by rank and name."""
    entries = dict(entries_of_ranks(section))
    return {name: _packed(section.pop(name)) for name in entries}


def _packed(entry: Mapping[str, Any]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def outline(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            found[_name(path, found)] = value.detach()
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        if isinstance(value, Mapping):
            return {key: outline(one, f"{path}.{key}") for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [outline(one, f"{path}.{at}") for at, one in enumerate(value)]
        return value

    file = io.BytesIO()
    torch.save(outline(entry, ""), file)
    return {_OUTLINE: torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8), **found}


def _name(path: str, taken: Mapping[str, Any]) -> str:
    """Return the name of the tensor at a path, which two paths with dots in them may share."""
    name = path.removeprefix(".")
    while name in taken:
        name += "'"
    return name


def stored_entries(folder: StoredFolder) -> dict[str, Any]:
    """Return the entries of a folder's ranks, with tensors that are not read.

    Raises:
        CheckpointError: One is damaged.
    """
    packed: Mapping[str, Mapping[str, StoredTensor]] = folder.nested(CHECKPOINT_KEY)
    outlines = {name: one[_OUTLINE] for name, one in packed.items() if _OUTLINE in one}
    read = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in outlines.items()}
    folder.read({one.key: read[name] for name, one in outlines.items()})
    return {name: _unpacked(folder, name, read[name], packed[name]) for name in read}


def _unpacked(
    folder: StoredFolder, rank: str, outline: Tensor, tensors: Mapping[str, StoredTensor]
) -> Any:
    taken: dict[str, StoredTensor] = {}

    def filled(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            name = _name(path, taken)
            taken[name] = tensors[name]
            return tensors[name]
        if isinstance(value, dict):
            return {key: filled(one, f"{path}.{key}") for key, one in value.items()}
        if isinstance(value, list):
            return [filled(one, f"{path}.{at}") for at, one in enumerate(value)]
        return value

    entry = folder.unpickled(outline.numpy().tobytes(), f"What {rank} has kept")
    try:
        return filled(entry, "")
    except KeyError as error:
        raise CheckpointError(
            f"The checkpoint {str(folder.path)!r} lacks {error} of what {rank} has kept, expected "
            f"all that its entry lists. Load another checkpoint."
        ) from error


class OnDemand(Mapping[str, Any]):
    """An entry whose tensors are read when somebody asks for one, and not held.

    Args:
        nested: Nested mappings and lists, with tensors that are not read.
    """

    def __init__(self, nested: Mapping[str, Any]) -> None:
        self._nested = nested

    @override
    def __getitem__(self, key: str) -> Any:
        return _asked_for(self._nested[key])

    @override
    def __contains__(self, key: object) -> bool:
        return key in self._nested

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._nested)

    @override
    def __len__(self) -> int:
        return len(self._nested)

    @property
    def outline(self) -> dict[str, Any]:
        """The entry, with placeholders for tensors; nothing is read."""
        shapes: dict[str, Any] = exchanged(self._nested, StoredTensor.placeholder)
        return shapes


def _asked_for(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return value.read()
    if isinstance(value, Mapping):
        return OnDemand(value)
    if isinstance(value, list):
        return [_asked_for(one) for one in value]
    return value
