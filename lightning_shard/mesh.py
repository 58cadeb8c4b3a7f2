"""The mesh of a run's ranks: pipeline, data and tensor parallel, a named axis each.

    ParallelMesh(pp=2, dp=2, tp=2)       tp is the fastest axis: neighbours in rank, usually on
                                         one host, exchange the most; pp is the slowest, and
                  tp 0    tp 1           exchanges the least
    pp 0  dp 0      0       1
          dp 1      2       3
    pp 1  dp 0      4       5
          dp 1      6       7

Which axes there are is data: `AXES`, from the slowest to the fastest by default. The arithmetic of
any axes is in `rank_grid`; `device_mesh` alone needs process groups. `print(mesh)` draws the grid.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Literal, get_args

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_shard.errors import ConfigError
from lightning_shard.mesh_picture import abbreviated, draw_mesh, save_mesh_png
from lightning_shard.option_checks import check_fields, checked_options
from lightning_shard.rank_grid import RankGrid, sizes_of

Axis = Literal["pp", "dp", "ep", "cp", "tp"]
ALL_AXES: tuple[Axis, ...] = get_args(Axis)
AXES: tuple[Axis, ...] = ("pp", "dp", "tp")  # of every mesh; others are axes where they have ranks
_BY_TRAFFIC: tuple[Axis, ...] = ("tp", "cp", "ep", "pp", "dp")  # of equals, the one that keeps tp
_NUM_PROPOSALS = 3


@dataclass(frozen=True, kw_only=True)
class NodePlacement:
    """The placement of a mesh's groups on nodes.

    Attributes:
        num_nodes: Number of nodes that hold a rank.
        ranks_per_node: Number of neighbouring ranks that share a node's fast links.
        nodes_per_group: For each axis of more than one rank, the most nodes that a group lies on.
        warnings: Messages about slow groups, with sizes or an order that would change it.
    """

    num_nodes: int
    ranks_per_node: int
    nodes_per_group: Mapping[Axis, int]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        places = [
            f"; {axis} across {num} nodes" if num > 1 else f"; {axis} inside a node"
            for axis, num in self.nodes_per_group.items()
        ]
        return f"nodes of {self.ranks_per_node} ranks: {self.num_nodes}{''.join(places)}"


@dataclass(frozen=True, kw_only=True)
class ParallelMesh:
    """The grid of a run's ranks.

    Attributes:
        pp: Number of stages that the model is cut into.
        dp: Number of groups that train on different batches.
        tp: Number of ranks that share every wide layer.
        cp: Number of ranks that share every sequence.
        ep: Number of ranks that share the experts of every mixture, and train on different batches.
        axis_order: The axes from the slowest to the fastest; of more than one rank, where they are
            not named, ep is the one after dp, and cp the one before tp.
        shard: Number of neighbouring `dp` groups that shard one copy of the state; None: all.

    Raises:
        ConfigError: A size is below 1, the order does not name each axis once, or copies of the
            state would not be equally large.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    axis_order: tuple[Axis, ...] = AXES
    shard: int | None = None
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes and orders that make no grid."""
        check_fields(self)
        object.__setattr__(self, "axis_order", _with_optional(self.axis_order, self.axes))
        if sorted(self.axis_order) != sorted(self.axes):
            raise ConfigError(
                f"axis_order must name each of {', '.join(self.axes)} once, got {self.axis_order}."
            )
        for axis in ALL_AXES:
            if self.size(axis) < 1:
                raise ConfigError(f"The {axis} axis must have at least 1 rank, got {self!r}.")
        if self.shard is not None and (self.shard < 1 or self.dp % self.shard):
            raise ConfigError(f"shard must divide the dp axis, got {self!r}.")

    @classmethod
    @checked_options
    def of_world(
        cls,
        world_size: int,
        *,
        pp: int = 1,
        tp: int = 1,
        dp: int = -1,
        cp: int = 1,
        ep: int = 1,
        axis_order: Sequence[Axis] = AXES,
    ) -> "ParallelMesh":
        """Make the mesh of all of `world_size` ranks; an axis of -1 takes what the others leave.

        Raises:
            ConfigError: A size is neither -1 nor at least 1, two are -1, or they do not multiply
                to the world's; with the nearest sizes that do.
        """
        of_all: dict[Axis, int] = {"pp": pp, "dp": dp, "ep": ep, "cp": cp, "tp": tp}
        sizes = {axis: size for axis, size in of_all.items() if axis in AXES or size != 1}
        asked = {axis: size for axis, size in sizes.items() if size > 0}
        rest = [axis for axis, size in sizes.items() if size == -1]
        num_asked = prod(asked.values())
        if world_size < 1:
            raise ConfigError(f"got a world of {world_size} ranks, expected at least 1.")
        if len(asked) + len(rest) < len(sizes) or len(rest) > 1:
            problem = (
                f"got {_named(sizes)} for {world_size} ranks, expected sizes of at least 1, "
                "or -1 for one axis, which takes the remaining ranks."
            )
        elif world_size % num_asked or not (rest or num_asked == world_size):
            problem = (
                f"{world_size} ranks cannot be split into groups of {_named(asked, ' times ')}; "
                f"expected sizes that {'divide' if rest else 'multiply to'} {world_size}, "
                f"got {num_asked}."
            )
        else:
            sizes |= dict.fromkeys(rest, world_size // num_asked)
            return cls(**sizes, axis_order=tuple(axis_order))
        raise ConfigError(f"{problem} Sizes that fit: {_nearest_sizes(world_size, asked)}.")

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of this mesh."""
        return tuple(axis for axis in ALL_AXES if axis in AXES or self.size(axis) != 1)

    @property
    def grid(self) -> RankGrid[Axis]:
        """The axes with their sizes, in their order."""
        return RankGrid({axis: self.size(axis) for axis in self.axis_order})

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.grid.num_ranks

    def size(self, axis: Axis) -> int:
        """Number of ranks along an axis."""
        size: int = getattr(self, axis)
        return size

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return a rank's index on each axis.

        Raises:
            ConfigError: The mesh has no such rank.
        """
        self._check_rank(rank)
        return self.grid.coordinates(rank)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"got rank {rank}, expected 0 to {self.world_size - 1} of {self!r}.")

    def rank_at(self, coordinates: Mapping[Axis, int]) -> int:
        """Return the rank at an index on each axis; a missing axis counts as 0."""
        return self.grid.rank_at(coordinates)

    def peers(self, axis: Axis | Sequence[Axis], rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` on these axes only, ascending, itself too.

        Args:
            axis: One axis, or several in any order.
            rank: Global rank in this mesh.

        Raises:
            ConfigError: The mesh has no such rank or axis.
        """
        self._check_rank(rank)
        return self.grid.peers(self._present(axis), rank)

    def groups(self, axis: Axis | Sequence[Axis]) -> list[tuple[int, ...]]:
        """Return every group of peers along these axes, in the order of their first ranks.

        Raises:
            ConfigError: The mesh has no such axis.
        """
        return self.grid.groups(self._present(axis))

    def _present(self, axes: Axis | Sequence[Axis]) -> Sequence[Axis]:
        """Return axes without those that are no axis of this mesh, where they have one rank."""
        along: Sequence[Axis] = [axes] if isinstance(axes, str) else axes
        return [axis for axis in along if axis not in ALL_AXES or axis in self.axes]

    def placement(self, ranks_per_node: int) -> NodePlacement:
        """Return which axes reach over nodes of `ranks_per_node` neighbouring ranks each.

        tp exchanges the most and belongs inside a node; pp the least, and belongs across nodes.

        Raises:
            ConfigError: `ranks_per_node` is below 1.
        """
        if ranks_per_node < 1:
            raise ConfigError(f"got {ranks_per_node} ranks per node, expected at least 1.")
        nodes = self._nodes_per_group(ranks_per_node)
        warnings = []
        if nodes.get("tp", 1) > 1:
            warnings.append(self._warning_of_tp(ranks_per_node))
        ordered = replace(self, axis_order=self.axes)._nodes_per_group(ranks_per_node)
        if nodes.get("pp") == 1 and nodes.get("dp", 1) > ordered.get("dp", 1):
            warnings.append(
                f"dp crosses nodes of {ranks_per_node} ranks and pp does not, though a model's "
                "gradients are more than what passes between its stages; "
                f"axis_order={self.axes} puts pp across nodes."
            )
        return NodePlacement(
            num_nodes=-(-self.world_size // ranks_per_node),
            ranks_per_node=ranks_per_node,
            nodes_per_group=nodes,
            warnings=tuple(warnings),
        )

    def _nodes_per_group(self, ranks_per_node: int) -> dict[Axis, int]:
        return {
            axis: max(len(_nodes(group, ranks_per_node)) for group in self.groups(axis))
            for axis in reversed(self.axes)
            if self.size(axis) > 1
        }

    def _warning_of_tp(self, ranks_per_node: int) -> str:
        groups = self.groups("tp")
        crossing = [group for group in groups if len(_nodes(group, ranks_per_node)) > 1]
        order = "" if self.axis_order[-1] == "tp" else f"axis_order={self.axes}"
        if ranks_per_node % self.tp == 0:
            remedy = f"{order} keeps tp inside a node"
        else:
            sizes = {axis: self.size(axis) for axis in self.axes}
            near = _nearest_sizes(self.world_size, sizes, lambda tp: ranks_per_node % tp == 0)
            remedy = f"sizes that keep tp inside a node{order and ', with '}{order}: {near}"
        return (
            f"{len(crossing)} of {len(groups)} tp groups cross nodes of {ranks_per_node} ranks, "
            f"such as ranks {', '.join(abbreviated(crossing[0], 4))}: every layer waits for the "
            f"network between them; {remedy}."
        )

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Make torch's mesh of the same shape and names; each rank must call."""
        shape = tuple(self.size(axis) for axis in self.axis_order)
        return init_device_mesh(device_type, shape, mesh_dim_names=self.axis_order)

    def save_png(self, path: str | Path, *, ranks_per_node: int | None = None) -> None:
        """Draw the grid into a PNG file, a colour per stage, or per node where its size is given.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        save_mesh_png(self._stages(), path, ranks_per_node=ranks_per_node, cp=self.cp, ep=self.ep)

    def _stages(self) -> list[list[tuple[int, ...]]]:
        return [
            [
                tuple(
                    self.rank_at({"pp": pp, "dp": dp, "ep": ep, "cp": cp, "tp": tp})
                    for cp in range(self.cp)
                    for tp in range(self.tp)
                )
                for dp in range(self.dp)
                for ep in range(self.ep)
            ]
            for pp in range(self.pp)
        ]

    def __str__(self) -> str:
        return draw_mesh(self._stages(), shard=self.shard, cp=self.cp, ep=self.ep)

    def __repr__(self) -> str:
        order = "" if self.axis_order == self.axes else f", axis_order={self.axis_order}"
        shard = "" if self.shard is None else f", shard={self.shard}"
        return (
            f"ParallelMesh({_named({axis: self.size(axis) for axis in self.axes})}{order}{shard})"
        )


def _with_optional(order: Sequence[Axis], axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Return an order that names the optional of `axes`, and those alone."""
    named = [axis for axis in order if axis in AXES or axis in axes]
    for axis in axes:
        if axis in AXES or axis in named or "tp" not in named or "dp" not in named:
            continue
        if axis == "ep":
            named.insert(named.index("dp") + 1, axis)
        else:
            named.insert(named.index("tp"), axis)
    return tuple(named)


def _nodes(ranks: Sequence[int], ranks_per_node: int) -> set[int]:
    return {rank // ranks_per_node for rank in ranks}


def _named(sizes: Mapping[Axis, int], between: str = ", ") -> str:
    return between.join(f"{axis}={size}" for axis, size in sizes.items())


def _nearest_sizes(
    world_size: int, asked: Mapping[Axis, int], allows_tp: Callable[[int], bool] = lambda _: True
) -> str:
    """Name the sizes that multiply to the world's and differ least, as factors, from `asked`."""
    axes = [axis for axis in ALL_AXES if axis in AXES or asked.get(axis, 1) != 1]
    by_traffic = [axis for axis in _BY_TRAFFIC if axis in axes]
    fitting = [one for one in sizes_of(world_size, by_traffic) if allows_tp(one["tp"])]

    def distance(sizes: dict[Axis, int]) -> tuple[Fraction, ...]:
        factors = [
            max(ratio := Fraction(sizes[axis], asked.get(axis, sizes[axis])), 1 / ratio)
            for axis in by_traffic
        ]
        return (prod(factors, start=Fraction(1)), *factors)  # of equals, the one that keeps tp

    nearest = sorted(fitting, key=distance)[:_NUM_PROPOSALS]
    return "; ".join(_named({axis: sizes[axis] for axis in axes}) for sizes in nearest)
