"""Which hosts the ranks of a mesh are on: what is said of it when a run begins.

A mesh takes neighbouring ranks to share a host. Launchers number ranks host by host unless told
otherwise, and then ranks that share a layer are apart though the mesh looks as it should:

    mpirun --map-by slot, srun --distribution=block     hosts 0 0 1 1    tp groups 0 1 | 2 3
    mpirun --map-by node, srun --distribution=cyclic    hosts 0 1 0 1    each of them crosses

Every strategy whose ranks share a model says so, whichever axes its mesh has.
"""

from collections.abc import Sequence
from itertools import pairwise

from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_shard.mesh import NodePlacement, ParallelMesh


def tell_placement(
    mesh: ParallelMesh, placement: NodePlacement, hosts: Sequence[int], *, announces: bool
) -> None:
    """Say which axes stay inside a host, and warn of groups that wait for the network.

    Args:
        mesh: The ranks of the run, on several hosts.
        placement: Where the ranks of its groups would lie if those of a host were neighbours.
        hosts: The host of each rank.
        announces: Whether to say what is no warning, too.
    """
    if not are_neighbours(hosts):
        rank_zero_warn(warning_of_scattered_ranks(mesh, hosts))
        return
    for warning in placement.warnings:
        rank_zero_warn(warning)
    if announces:
        rank_zero_info(f"{mesh!r} on {placement}")


def are_neighbours(hosts: Sequence[int]) -> bool:
    """Whether the ranks of each host follow each other; `hosts` has the host of each rank."""
    changes = sum(one != other for one, other in pairwise(hosts))
    return changes == len(set(hosts)) - 1


def warning_of_scattered_ranks(mesh: ParallelMesh, hosts: Sequence[int]) -> str:
    """Return what to say when the ranks of a host are not neighbours.

    Args:
        mesh: The ranks of the run.
        hosts: The host of each rank.
    """
    first = ", ".join(str(rank) for rank, host in enumerate(hosts) if host == hosts[0])
    layers, copies = mesh.groups("tp"), _copies_of_state(mesh)
    told = [
        f"The mesh takes the ranks of a host to be neighbours, but rank 0's host has ranks {first}."
    ]
    if crossing := _num_crossing(layers, hosts):
        told.append(
            f"So {crossing} of {len(layers)} tp groups cross hosts, and every layer of theirs "
            "waits for the network between them."
        )
    if crossing := _num_crossing(copies, hosts):
        told.append(
            f"So {crossing} of {len(copies)} copies of the state cross hosts, and gathers wait for "
            "the network between them."
        )
    told.append(
        "Have the ranks numbered host by host: `mpirun --map-by slot` or "
        "`srun --distribution=block`."
    )
    return " ".join(told)


def _copies_of_state(mesh: ParallelMesh) -> list[tuple[int, ...]]:
    """Return the ranks of each copy of the state, where there is more than one."""
    size = mesh.shard or mesh.dp
    if size == mesh.dp:
        return []
    return [
        group[first : first + size]
        for group in mesh.groups("dp")
        for first in range(0, mesh.dp, size)
    ]


def _num_crossing(groups: Sequence[Sequence[int]], hosts: Sequence[int]) -> int:
    return sum(len({hosts[rank] for rank in group}) > 1 for group in groups)
