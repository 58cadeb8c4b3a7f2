"""`data_parallel_size=(replicate, shard)`: copies of the state, and the ranks of each copy.

The shard axis is the faster one, so that the ranks of a copy are neighbours and share a node:

    (2, 4) on ranks 0 to 7        shard [0 1 2 3] [4 5 6 7]        replicate [0 4] [1 5] [2 6] [3 7]
"""

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_shard.core.mesh import ParallelMesh
from lightning_shard.core.options import Limit
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.errors import ConfigError

_NUM_PROPOSALS = 3


def _is_size(size: int | tuple[int, int]) -> bool:
    sizes = (size,) if isinstance(size, int) else size
    return all(one >= 1 or one == -1 for one in sizes) and size != (-1, -1)


DataParallelSize: TypeAlias = Annotated[
    int | tuple[int, int],
    Limit("(replicate and shard), at least 1 or -1 for what the others leave", _is_size),
]


def shard_size(size: DataParallelSize, num_ranks: int) -> int:
    """Return how many of the data-parallel ranks share out one copy of the state."""
    if isinstance(size, int):
        return num_ranks
    replicate, shard = size
    if shard == -1:
        shard = num_ranks // replicate
    fitting = [one for one in range(1, num_ranks + 1) if num_ranks % one == 0]
    if shard in fitting and replicate in (-1, num_ranks // shard):
        return shard
    nearest = sorted(fitting, key=lambda one: abs(one - shard))[:_NUM_PROPOSALS]
    proposals = ", ".join(f"({num_ranks // one}, {one})" for one in nearest)
    raise ConfigError(
        f"data_parallel_size={size} does not multiply to the {num_ranks} data-parallel ranks of "
        f"this run. Pairs (replicate, shard) that do: {proposals}."
    )


def shard_ranks(ranks: Sequence[int], rank: int, size: int) -> Sequence[int]:
    """Return the data-parallel `ranks`, `size` to a copy, that share `rank`'s copy of the state."""
    first = ranks.index(rank) // size * size
    return ranks[first : first + size]


def replicate_ranks(ranks: Sequence[int], rank: int, size: int) -> Sequence[int]:
    """Return the data-parallel `ranks`, `size` to a copy, that have the same shard as `rank`."""
    return ranks[ranks.index(rank) % size :: size]


def warning_of_unshards(mesh: ParallelMesh, size: int, ranks_per_node: int) -> str | None:
    """Return what to say when copies of `size` ranks cross nodes; None when they do not."""

    def crosses(size: int) -> bool:
        return any(
            dp[first] // ranks_per_node != dp[first + size - 1] // ranks_per_node
            for dp in mesh.groups("dp")
            for first in range(0, mesh.dp, size)
        )

    if not crosses(size):
        return None
    inside = max(one for one in range(1, size) if mesh.dp % one == 0 and not crosses(one))
    return (
        f"Copies of the state over {size} ranks cross nodes of {ranks_per_node} ranks, so gathers "
        f"wait for the network between them; data_parallel_size=({mesh.dp // inside}, {inside}) "
        f"keeps them inside a node."
    )


def with_secondary(groups: DataGroups, size: int | None, strategy: Any) -> DataGroups:
    """Add the group of `size` ranks that have a second copy of parameters; each rank must call.

    `strategy` is the Trainer's or Fabric's.
    """
    made = groups.with_secondary(size, strategy.local_ranks.timeout)
    if made.secondary is not None and strategy.num_nodes > 1:
        nodes, step = groups.dp.all_gather_object(strategy.node_rank), made.secondary.size
        parts = [nodes[first : first + step] for first in range(0, len(nodes), step)]
        if crossing := sum(len(set(part)) > 1 for part in parts):
            rank_zero_warn(
                f"{crossing} of {len(parts)} groups of reshard_after_forward={size} ranks cross "
                f"nodes, so that gathers of backward wait for the network between them; expected "
                f"a divisor of a node's ranks, which follow each other."
            )
    return made
