"""What each rank keeps for itself, in the section of a checkpoint: an entry for each rank.

    checkpoint["lightning_shard"] = {
        "format": 2,
        "mesh": {"pp": 1, "dp": 2, "tp": 1, "order": "pp dp tp"},
        "rank_0": {"random": ..., "compression": ..., "local_sgd": ...},
        "rank_1": ...
    }

A rank takes up its entry where the mesh is the same, and goes on to the bit. For any other mesh the
rest of the section has what counts for all ranks together. Entries are nested dictionaries of
tensors and plain values, so that torch reads them without unpickling code. In a file rank 0 has
brought them together; in a folder each rank writes its own, see `sharded.rank_entries`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_shard.backends.collectives import Collectives
from lightning_shard.data_parallel.host_copies import host_copy
from lightning_shard.mesh import ParallelMesh

_PREFIX = "rank_"


def mesh_entry(mesh: ParallelMesh) -> dict[str, Any]:
    """Return the section's description of a mesh, which is equal for equal meshes."""
    return {**{axis: mesh.size(axis) for axis in mesh.axes}, "order": " ".join(mesh.axis_order)}


def own_entry(section: Mapping[str, Any], mesh: ParallelMesh, rank: int) -> Mapping[str, Any]:
    """Return what a rank has kept for itself; {} where the mesh was another, or nothing was kept.

    Args:
        section: The section of a checkpoint.
        mesh: The mesh of this run.
        rank: This rank in the mesh.
    """
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
    """Return the section's entries of a rank that nobody brings together with the others'.

    Args:
        own: What the rank keeps.
        mesh: The mesh of the run.
        rank: The rank in it.
    """
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
    own: Mapping[str, Any], mesh: ParallelMesh, collectives: Collectives, device: torch.device
) -> dict[str, Any]:
    """Bring the entries of all ranks together on rank 0; each rank must call.

    Rank 0 holds one tensor of each rank at a time on the device; what is together is on the CPU.

    Args:
        own: This rank's entry.
        mesh: The mesh of the run, whose ranks are those of `collectives`.
        collectives: Group of all ranks.
        device: Device over which tensors travel.

    Returns:
        On rank 0 the entries of the section, the mesh among them; {} on other ranks.
    """
    mine = [one.detach() for one in tree_leaves(own) if isinstance(one, Tensor)]
    forms = [(tuple(one.shape), one.dtype) for one in mine]
    told = collectives.all_gather_object((_without_elements(own), forms))
    collected: list[list[Tensor]] = [[] for _ in told]
    for number in range(max(len(forms) for _, forms in told)):
        sizes = [_num_bytes(*forms[number]) if number < len(forms) else 0 for _, forms in told]
        sent = mine[number] if number < len(mine) else torch.empty(0)
        for rank, data in enumerate(_on_first(sent, sizes, collectives, device)):
            if number < len(told[rank][1]):
                shape, dtype = told[rank][1][number]
                collected[rank].append(data.view(dtype).view(shape))
    if collectives.rank != 0:
        return {}
    entries = {
        f"{_PREFIX}{rank}": _filled(frame, tensors)
        for rank, ((frame, _), tensors) in enumerate(zip(told, collected, strict=True))
    }
    return {"mesh": mesh_entry(mesh), **entries}


class _Place:
    """Stands for a tensor that travels by itself."""


def _without_elements(entry: Any) -> Any:
    return tree_map_only(Tensor, lambda _: _Place(), entry)


def _filled(frame: Any, tensors: list[Tensor]) -> Any:
    """Put tensors into their places, in order."""
    in_order = iter(tensors)
    return tree_map_only(_Place, lambda _: next(in_order), frame)


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _on_first(
    tensor: Tensor, sizes: list[int], collectives: Collectives, device: torch.device
) -> list[Tensor]:
    """Return the bytes of each rank's tensor on rank 0, on the CPU; [] on other ranks."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    if collectives.size == 1:
        return [host_copy(data)]
    is_first = collectives.rank == 0
    received = sizes if is_first else [0] * len(sizes)
    output = torch.empty(sum(received), dtype=torch.uint8, device=device)
    collectives.all_to_all(
        output,
        data.to(device),
        output_split_sizes=received,
        input_split_sizes=[data.numel(), *[0] * (len(sizes) - 1)],
    ).wait()
    return [host_copy(one) for one in torch.split(output, received)] if is_first else []
