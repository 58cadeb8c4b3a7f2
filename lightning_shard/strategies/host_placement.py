"""Which hosts the ranks of a mesh are on: what is said of it when a run begins.

A mesh takes neighbouring ranks to share a host. Launchers number ranks host by host unless told
otherwise, and then ranks that share a layer are apart though the mesh looks as it should:

    mpirun --map-by slot, srun --distribution=block     hosts 0 0 1 1    tp groups 0 1 | 2 3
    mpirun --map-by node, srun --distribution=cyclic    hosts 0 1 0 1    each of them crosses
"""

from collections.abc import Sequence
from itertools import pairwise

from lightning_shard.mesh import ParallelMesh


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
    groups = mesh.groups("tp")
    num_crossing = sum(len({hosts[rank] for rank in group}) > 1 for group in groups)
    first = ", ".join(str(rank) for rank, host in enumerate(hosts) if host == hosts[0])
    about_layers = (
        f" So {num_crossing} of {len(groups)} tp groups cross hosts, and every layer of theirs "
        "waits for the network between them."
    )
    return (
        f"The mesh takes the ranks of a host to be neighbours, but rank 0's host has ranks {first}."
        f"{about_layers if num_crossing else ''} Have the ranks numbered host by host: "
        "`mpirun --map-by slot` or `srun --distribution=block`."
    )


def told_placement(mesh: ParallelMesh, ranks_per_host: int) -> str:
    """Return the line that says which axes stay inside a host of so many neighbouring ranks."""
    return f"{mesh!r} on {mesh.placement(ranks_per_host)}"
