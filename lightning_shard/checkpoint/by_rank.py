"""What each rank keeps for itself, in the section of a checkpoint: an entry for each rank.

    checkpoint["lightning_shard"] = {
        "format": 3,
        "mesh": {"pp": 1, "dp": 2, "tp": 1, "order": "pp dp tp"},
        "rank_0": {"random": ..., "compression": ..., "local_sgd": ...},
        "rank_1": ...
    }

On the same mesh a rank takes up its entry, and goes on to the bit; on any other one ranks go on
from means of all entries. They are nested dictionaries of tensors and plain values, so that torch
reads them without unpickling code. Into a folder each rank writes its own, see `sharded.entries`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_shard.backends.collectives import Collectives
from lightning_shard.checkpoint.arriving import ArrivingTensor, SlicedTensor, arriving
from lightning_shard.checkpoint.streamed import StreamedFile
from lightning_shard.core.mesh import ParallelMesh

_PREFIX = "rank_"
_Told = tuple[Any, list[tuple[tuple[int, ...], torch.dtype]]]  # an entry, and what its tensors are


def mesh_entry(mesh: ParallelMesh) -> dict[str, Any]:
    """Return the section's description of a mesh, which is equal for equal meshes."""
    return {**{axis: mesh.size(axis) for axis in mesh.axes}, "order": " ".join(mesh.axis_order)}


def own_entry(section: Mapping[str, Any], mesh: ParallelMesh, rank: int) -> Mapping[str, Any]:
    """Return what a rank has kept for itself; {} where the mesh was another, or nothing was."""
    entry: Mapping[str, Any] = {}
    if section.get("mesh") == mesh_entry(mesh):
        entry = section.get(f"{_PREFIX}{rank}", {})
    return entry


def entries_of_ranks(section: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the entry of each rank, in their order."""
    names = [name for name in section if name.removeprefix(_PREFIX).isdigit()]
    for name in sorted(names, key=lambda name: int(name.removeprefix(_PREFIX))):
        yield name, section[name]


def entry_alone(own: Mapping[str, Any], mesh: ParallelMesh, rank: int) -> dict[str, Any]:
    """Return the section's entries of a rank that nobody brings together with the others'."""
    return {"mesh": mesh_entry(mesh), f"{_PREFIX}{rank}": own}


def outline(entry: Any) -> Any:
    """Return an entry to look at: one that is not read has placeholders for its tensors."""
    return getattr(entry, "outline", entry)


def in_memory(value: Any) -> Any:
    """Return nested mappings and lists as they are when all of their tensors are read."""
    if isinstance(value, Mapping):
        return {key: in_memory(one) for key, one in value.items()}
    return [in_memory(one) for one in value] if isinstance(value, list) else value


def gather_entries(
    own: Mapping[str, Any],
    mesh: ParallelMesh,
    collectives: Collectives,
    device: torch.device,
    file: StreamedFile | None = None,
) -> dict[str, Any]:
    """Bring all ranks' entries to rank 0's CPU, with a `file` while it is written; collective."""
    told, places = _told(own, collectives)
    coming = zip(places, _arriving(own, told, collectives, device), strict=True)
    if file is not None:
        file.add_source((("kept", *place), one) for place, one in coming)
        return _section(
            told, mesh, lambda *of: file.await_tensor(("kept", *of[:2]), *of[2:]), collectives
        )
    here = {place: one.tensor().cpu() for place, one in coming if collectives.rank == 0}
    return _section(told, mesh, lambda rank, number, *_: here[rank, number], collectives)


class _Place:
    """Stands for a tensor that travels by itself."""


def _filled(frame: Any, tensors: list[Tensor]) -> Any:
    in_order = iter(tensors)
    return tree_map_only(_Place, lambda _: next(in_order), frame)


def _told(
    own: Mapping[str, Any], collectives: Collectives
) -> tuple[list[_Told], list[tuple[int, int]]]:
    """Tell each other what entries are like; return it with rank and number of each tensor."""
    frame = tree_map_only(Tensor, lambda _: _Place(), own)
    forms = [(tuple(one.shape), one.dtype) for one in _tensors(own)]
    told: list[_Told] = collectives.all_gather_object((frame, forms))
    return told, [(rank, at) for rank, (_, each) in enumerate(told) for at in range(len(each))]


def _arriving(
    own: Mapping[str, Any], told: Sequence[_Told], collectives: Collectives, device: torch.device
) -> Iterator[ArrivingTensor]:
    """Bring the tensors of entries to rank 0 in turn; each rank must run through them."""
    mine = iter(_tensors(own))
    sliced = []
    for rank, (_, forms) in enumerate(told):
        for shape, dtype in forms:
            numels = [0] * collectives.size
            numels[rank] = torch.Size(shape).numel()
            here = next(mine) if rank == collectives.rank else None
            sliced.append(SlicedTensor(shape, dtype, numels, here))
    return arriving(sliced, collectives, device)


def _section(
    told: Sequence[_Told],
    mesh: ParallelMesh,
    tensor: Callable[[int, int, tuple[int, ...], torch.dtype], Tensor],
    collectives: Collectives,
) -> dict[str, Any]:
    """Return the section's entries on rank 0, with what `tensor` returns in their places."""
    if collectives.rank != 0:
        return {}
    entries = {
        f"{_PREFIX}{rank}": _filled(
            frame, [tensor(rank, number, *form) for number, form in enumerate(forms)]
        )
        for rank, (frame, forms) in enumerate(told)
    }
    return {"mesh": mesh_entry(mesh), **entries}


def _tensors(entry: Any) -> list[Tensor]:
    return [one.detach() for one in tree_leaves(entry) if isinstance(one, Tensor)]
