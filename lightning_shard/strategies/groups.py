"""The groups of a rank: all ranks, those of other samples, those that share gradients or a model.

Without dimensions they are all the same ranks. Which hosts they are on is said when a run begins: a
mesh takes neighbouring ranks to share a host. Launchers number ranks host by host unless told
otherwise, and then ranks that share a layer are apart though the mesh looks as it should:

    mpirun --map-by slot, srun --distribution=block     hosts 0 0 1 1    tp groups 0 1 | 2 3
    mpirun --map-by node, srun --distribution=cyclic    hosts 0 1 0 1    each of them crosses

`data_parallel_size=(replicate, shard)`: copies of the state, and the ranks of each copy.

The shard axis is the faster one, so that the ranks of a copy are neighbours and share a node:

    (2, 4) on ranks 0 to 7        shard [0 1 2 3] [4 5 6 7]        replicate [0 4] [1 5] [2 6] [3 7]
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, TypeAlias

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_shard.backends.collectives import Collectives
from lightning_shard.core.mesh import ALL_AXES, Axis, NodePlacement, ParallelMesh
from lightning_shard.core.options import Limit
from lightning_shard.core.states import setting
from lightning_shard.data_parallel.compression.compressor import total_bytes
from lightning_shard.data_parallel.data_groups import DataGroups
from lightning_shard.errors import ConfigError
from lightning_shard.strategies.dimensions.dimension import RunGroups
from lightning_shard.strategies.parts import RunPart
from lightning_shard.strategies.trainer.same_on_ranks import check_same_settings, common_seed

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


MakeGroup = Callable[[Sequence[int]], Collectives]


def tell_placement(
    mesh: ParallelMesh, placement: NodePlacement, hosts: Sequence[int], *, announces: bool
) -> None:
    """Warn of groups that wait for the network, and if it `announces` say which axes do not."""
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
    """Return what to say when the ranks of a host are not neighbours."""
    first = ", ".join(str(rank) for rank, host in enumerate(hosts) if host == hosts[0])
    layers, copies = mesh.groups("tp"), [one for same in mesh.copies for one in same]
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


def _num_crossing(groups: Sequence[Sequence[int]], hosts: Sequence[int]) -> int:
    return sum(len({hosts[rank] for rank in group}) > 1 for group in groups)


class MeshGroups(RunPart):
    """A rank's place in the mesh, and its groups while there are some.

    Attributes:
        everybody: All ranks; None where this rank asks nobody.
        reducing: Second groups of those that average gradients, for gradients.
        secondary: Those that have a second copy of parameters; None without dimensions or option.
        seed: Rank 0's, where others have another.
    """

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.everybody: Collectives | None = None
        self.reducing: DataGroups | None = None
        self.made: RunGroups | None = None
        self.secondary: Collectives | None = None
        self.seed: int | None = None
        self._made_beside: dist.ProcessGroup | None = None  # the default group

    # --- places -----------------------------------------------------------------------------------

    @property
    def mesh(self) -> ParallelMesh:
        """The grid of the ranks."""
        size, asked = self.strategy.mesh_size, self.strategy.data_parallel_size
        own = {one.axis: size if one.size is None else one.size for one in self.strategy.dimensions}
        others = {axis: own.pop(axis) for axis in [*own] if axis not in ALL_AXES}
        known: dict[str, Any] = {**own, "dp": asked if isinstance(asked, int) else -1}
        order = self.strategy.axis_order
        mesh = ParallelMesh.of_world(size, **known, others=others, axis_order=order)
        if isinstance(asked, int) or self.strategy.stage == 0:
            return mesh
        return replace(mesh, shard=shard_size(asked, mesh.dp))

    @property
    def sample_axes(self) -> list[Axis]:
        """The axes whose ranks are given different samples."""
        return ["dp", *(one.axis for one in self.strategy.dimensions if one.has_own_samples)]

    @property
    def gradient_axes(self) -> list[Axis]:
        """The axes whose ranks have the same parameters and average their gradients."""
        return ["dp", *(one.axis for one in self.strategy.dimensions if one.averages_gradients)]

    @property
    def model_ranks(self) -> Sequence[int]:
        """The global ranks that share this rank's model, and are given the same samples."""
        axes = [one.axis for one in self.strategy.dimensions if not one.has_own_samples]
        return self._peers(axes)

    @property
    def shard_size(self) -> int:
        """How many of the ranks that average gradients share out a copy of the state."""
        mesh = self.mesh  # a copy of the state is in shards on all that share its sequences
        return shard_size(self.strategy.data_parallel_size, mesh.dp) * (
            mesh.size(*self.gradient_axes) // mesh.dp
        )

    @property
    def splits_model(self) -> bool:
        """Whether a rank has a part of the model only."""
        splits = [
            one
            for one in self.strategy.dimensions
            if one.has_own_samples or not one.averages_gradients
        ]
        return any(self.mesh.size(one.axis) > 1 for one in splits)

    def placement(self, ranks_per_node: int) -> NodePlacement:
        """Say which groups reach over nodes of so many neighbouring ranks, and what is slow."""
        mesh = self.mesh
        found = mesh.placement(ranks_per_node)
        about = mesh.shard and warning_of_unshards(mesh, mesh.shard, ranks_per_node)
        return replace(found, warnings=(*found.warnings, about)) if about else found

    def _peers(self, axes: Sequence[Axis]) -> Sequence[int]:
        return self.mesh.peers(axes, self.strategy.mesh_rank)

    def place_among_samples(self) -> tuple[int, int]:
        """Return this rank's number among those that are given other samples, and how many."""
        if self.made is not None:
            return self.made.samples.rank, self.made.samples.size
        ranks = self._peers(self.sample_axes)
        return ranks.index(self.strategy.mesh_rank), len(ranks)

    # --- groups -----------------------------------------------------------------------------------

    @property
    def all_ranks(self) -> Collectives:
        """All ranks; there once the environment is set up."""
        if self.everybody is None:
            raise ConfigError("There are no collectives before trainer.fit (or validate ...) runs.")
        return self.everybody

    @property
    def present(self) -> Collectives | None:
        """All ranks; None where this rank asks nobody."""
        return self.everybody if dist.is_initialized() else None

    @property
    def of_models(self) -> RunGroups:
        """The groups of ranks that share models."""
        if self.made is None:
            raise ConfigError("There are no groups before trainer.fit (or validate ...) runs.")
        return self.made

    @property
    def samples(self) -> Collectives:
        """The ranks that are given other samples."""
        return self.of_models.samples if self.strategy.dimensions else self.all_ranks

    @property
    def gradients(self) -> DataGroups:
        """The ranks that average gradients, and how they share out the state."""
        if self.strategy.dimensions:
            return self.of_models.gradients
        return replace(DataGroups.of(self.all_ranks), secondary=self.secondary)

    def sent_bytes(self) -> int:
        """Return all bytes that this rank has sent so far over the groups that steps use."""
        reducing = [] if self.reducing is None else self.reducing.all
        groups = [self.everybody, self.secondary, *reducing]
        return total_bytes(group.traffic for group in groups if group is not None)

    def use(self) -> None:
        """Talk over the default group there is; each rank must call."""
        group = dist.group.WORLD
        assert group is not None
        backend, known = self.strategy.backend, self.everybody
        if known is not None and self._made_beside is group:
            self.everybody = backend.collectives(known.group)
        else:
            self.everybody = backend.of_all_ranks(self.strategy.local_ranks.timeout)
        self.run.loops.compare_over(self.everybody)
        if self.run.hooks.compares_start():  # before groups are made that depend on it
            trainer = self.run.trainer
            check_same_settings(self.strategy, self.everybody, trainer)
            self.seed = common_seed(self.everybody)
        if self._made_beside is not group and not self.run.hooks.chooses_groups():
            self.make()
            self._made_beside = group

    def make(self, make_group: MakeGroup | None = None) -> None:
        """Make the groups beside the default one, once for each default group."""
        if self.strategy.dimensions:
            self._make_of_models(make_group or self._group)
        else:
            size, ranks = self.run.options.reshard_after_forward, DataGroups.of(self.all_ranks)
            self.secondary = with_secondary(ranks, size, self.strategy).secondary
        self.reducing = self.gradients.duplicate(self.strategy.local_ranks.timeout)
        self.run.hooks.make_groups()

    def _make_of_models(self, group: MakeGroup) -> None:
        strategy = self.strategy
        if strategy.num_nodes > 1:
            hosts = self.all_ranks.all_gather_object(strategy.node_rank)
            placement = self.placement(strategy.num_processes)
            tell_placement(self.mesh, placement, hosts, announces=self.run.announces)
        peers = partial(self.mesh.peers, rank=strategy.mesh_rank)
        samples, averaging = group(peers(self.sample_axes)), peers(self.gradient_axes)
        is_more = len(averaging) > samples.size
        self.made = RunGroups(
            samples=samples,
            gradients=self._sharing_out(group(averaging) if is_more else samples, averaging, group),
            model=group(self.model_ranks),
            along={one.axis: group(peers(one.axis)) for one in self.strategy.dimensions},
            of_parts=self._of_parts(peers, group),
        )

    def _of_parts(
        self, peers: Callable[[Sequence[Axis]], Sequence[int]], group: MakeGroup
    ) -> tuple[DataGroups, DataGroups] | None:
        """Return the ranks that have the same parts of what is shared out over averaging ranks."""
        mesh = self.mesh
        axes = [axis for axis in self.sample_axes if axis != "dp" and mesh.size(axis) > 1]
        if not axes:
            return None
        same = [axis for axis in self.gradient_axes if axis not in axes]
        ranks = DataGroups.of(group(peers(same)))
        return ranks, ranks.duplicate(self.strategy.local_ranks.timeout)

    def _sharing_out(self, dp: Collectives, ranks: Sequence[int], group: MakeGroup) -> DataGroups:
        """Return the groups of ranks that average gradients, some of which share out the state."""
        size, rank = self.shard_size, self.strategy.mesh_rank
        if size == len(ranks):
            return DataGroups.of(dp)
        return DataGroups(
            dp=dp,
            shard=group(shard_ranks(ranks, rank, size)),
            replicate=group(replicate_ranks(ranks, rank, size)),
        )

    def _group(self, ranks: Sequence[int]) -> Collectives:
        """Make a group; the ranks of it must call."""
        return self.all_ranks.beside(ranks, self.strategy.local_ranks.timeout)

    def forget(self) -> None:
        """Refer to no group any more; Gloo aborts when somebody does as one is destroyed."""
        self.everybody = self.reducing = self.made = self.secondary = None
        self._made_beside = None
        self.run.hooks.forget_groups()

    def asking_nobody(self) -> AbstractContextManager[None]:
        """Inside, this rank talks to no other."""
        return setting(self, everybody=None)
