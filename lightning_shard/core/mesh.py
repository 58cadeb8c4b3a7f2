"""The mesh of a run's ranks: pipeline, data and tensor parallel, a named axis each.

    ParallelMesh(pp=2, dp=2, tp=2)       tp is the fastest axis: neighbours in rank, usually on
                                         one host, exchange the most; pp is the slowest, and
                  tp 0    tp 1           exchanges the least
    pp 0  dp 0      0       1
          dp 1      2       3            rank 5 = 1 * 4 + 0 * 2 + 1
    pp 1  dp 0      4       5            coordinates {"pp": 1, "dp": 0, "tp": 1}
          dp 1      6       7

Which axes there are is data. The arithmetic of any axes is `RankGrid`'s; `device_mesh` alone needs
process groups. `print(mesh)` draws the grid as text, `save_png` as a picture: the stages side by
side, a row for each replica. What does not fit between an axis's first and last is left out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product
from math import nan, prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_shard.core.options import AtLeastOne, Limit, check_fields, checked_options, told_by
from lightning_shard.core.reporting.output import new_figure
from lightning_shard.errors import ConfigError

Stages = Sequence[Sequence[Sequence[int]]]  # ranks by stage, replica and place in the tensor group
_WIDTH = 100  # columns of the text
_MOST_ROWS = 8
_MOST_COLUMNS = 16
_FEWEST = 3  # the first, an ellipsis, the last
_NUM_COLOURS = 12  # of the colour map Set3: light, so that numbers are legible on it
_CELL = (0.4, 0.35)  # inches
_LARGEST = (16.0, 12.0)  # inches
_MOST_LABELS = 1024  # ranks; more would not be legible
_MOST_TICKS = 32
Axis: TypeAlias = str
KnownAxis = Literal["pp", "dp", "ep", "cp", "tp"]
ALL_AXES: tuple[KnownAxis, ...] = get_args(KnownAxis)
AXES: tuple[KnownAxis, ...] = ("pp", "dp", "tp")  # of every mesh; others where they have ranks
_BY_TRAFFIC: tuple[Axis, ...] = ("tp", "cp", "ep", "pp", "dp")  # of equals, the one that keeps tp
_NUM_PROPOSALS = 3
_FURTHER = Limit(
    "of sizes of at least 1 by names of further axes",
    lambda sizes: all(size >= 1 and axis not in ALL_AXES for axis, size in sizes.items()),
)


class RankGrid:
    """A grid of ranks, of so many along each axis, from the slowest to the fastest."""

    def __init__(self, sizes: Mapping[Axis, int]) -> None:
        self.sizes = dict(sizes)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the grid."""
        return prod(self.sizes.values())

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return the index of `rank` on each axis."""
        found: dict[Axis, int] = {}
        for axis, size in reversed(self.sizes.items()):
            rank, found[axis] = divmod(rank, size)
        return found

    def rank_at(self, coordinates: Mapping[Axis, int]) -> int:
        """Return the rank at an index on each axis; a missing axis counts as 0."""
        rank = 0
        for axis, size in self.sizes.items():
            rank = rank * size + coordinates.get(axis, 0)
        return rank

    def peers(self, axes: Axis | Sequence[Axis], rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` on these axes only, ascending, itself too."""
        along = self._known(axes)
        first = self.rank_at(self.coordinates(rank) | dict.fromkeys(along, 0))
        return tuple(first + offset for offset in self._corner(along))

    def groups(self, axes: Axis | Sequence[Axis]) -> list[tuple[int, ...]]:
        """Return every group of peers along these axes, in the order of their first ranks."""
        along = self._known(axes)
        offsets = self._corner(along)
        firsts = self._corner([other for other in self.sizes if other not in along])
        return [tuple(first + offset for offset in offsets) for first in firsts]

    def _known(self, axes: Axis | Sequence[Axis]) -> Sequence[Axis]:
        along: Sequence[Axis] = [axes] if isinstance(axes, str) else axes
        if not set(along) <= set(self.sizes):
            known = ", ".join(self.sizes)
            raise ConfigError(f"got axis {axes!r}, expected one or several of {known}.")
        return along

    def _corner(self, along: Sequence[Axis]) -> list[int]:
        """Return the ranks at index 0 of every other axis, ascending."""
        ranks = [0]
        for axis, size in self.sizes.items():
            indices = range(size if axis in along else 1)
            ranks = [rank * size + index for rank in ranks for index in indices]
        return ranks


def sizes_of(num_ranks: int, axes: Sequence[Axis]) -> Iterator[dict[Axis, int]]:
    """Yield every grid of `num_ranks` ranks, those with a small first axis first."""
    first, *others = axes
    if not others:
        yield {first: num_ranks}
        return
    for size in range(1, num_ranks + 1):
        if num_ranks % size == 0:
            for rest in sizes_of(num_ranks // size, others):
                yield {first: size, **rest}


def draw_mesh(mesh: "ParallelMesh") -> str:
    """Draw the grid and list its groups, at most 100 columns wide."""
    stages = _stages(mesh)
    most_stages, most_ranks = (
        min(size, _MOST_COLUMNS) for size in (len(stages), len(stages[0][0]))
    )
    while True:
        lines = _draw_boxes(stages, most_stages, most_ranks, mesh.ep)
        if len(lines[1]) <= _WIDTH or max(most_stages, most_ranks) <= _FEWEST:
            break
        if most_stages > most_ranks:
            most_stages -= 1
        else:
            most_ranks -= 1
    return "\n".join([_summary(mesh), "", *lines, "", *_group_lines(mesh, stages)]).rstrip()


def abbreviated(items: Sequence[object], most: int) -> list[str]:
    """Write each item, or the first ones, an ellipsis and the last where there are too many."""
    return ["..." if index is None else str(items[index]) for index in _shown(len(items), most)]


def save_mesh_png(
    mesh: "ParallelMesh", path: str | Path, *, ranks_per_node: int | None = None
) -> None:
    """Draw the grid into a PNG file, a colour per stage, or per node where its size is given."""
    stages = _stages(mesh)
    pp, dp, tp = _sizes(stages)
    step = tp + 1  # a column is left free between the stages
    width = min(_LARGEST[0], 2 + _CELL[0] * pp * step)
    height = min(_LARGEST[1], 1.5 + _CELL[1] * dp)
    figure = new_figure(path, size=(width, height), otherwise="print(mesh) needs nothing.")
    axes = figure.add_subplot()
    _draw_cells(axes, stages, ranks_per_node)
    if pp * dp * tp <= _MOST_LABELS:
        _label_ranks(axes, stages, min(9.0, 30 * width / (pp * step)))
    stages_shown, rows_shown = _ticks(pp), _ticks(dp)
    axes.set_xticks(
        [index * step + tp / 2 for index in stages_shown],
        [f"stage {index}" for index in stages_shown],
    )
    axes.set_yticks(
        [index + 0.5 for index in rows_shown], [_row(index, mesh.ep) for index in rows_shown]
    )
    axes.tick_params(length=0, labelsize=8)
    axes.invert_yaxis()
    axes.set_frame_on(False)
    colours = (
        f"a colour per node of {ranks_per_node} ranks" if ranks_per_node else "a colour per stage"
    )
    axes.set_title(f"{_summary(mesh)}\n{colours}", fontsize=8)
    figure.savefig(path, format="png", dpi=150)


def _sizes(stages: Stages) -> tuple[int, int, int]:
    return len(stages), len(stages[0]), len(stages[0][0])


def _stages(mesh: "ParallelMesh") -> Stages:
    """Return the ranks by stage, replica and place among those that share a stage's layers."""

    def places(*axes: Axis) -> list[dict[Axis, int]]:
        found = product(*(range(mesh.size(axis)) for axis in axes))
        return [dict(zip(axes, place, strict=True)) for place in found]

    rows, columns = places("dp", "ep"), places("cp", *mesh.others, "tp")
    return [
        [tuple(mesh.rank_at({**stage, **row, **column}) for column in columns) for row in rows]
        for stage in places("pp")
    ]


def _summary(mesh: "ParallelMesh") -> str:
    axes = [(mesh.pp, "stage", "(pp)"), (mesh.dp, "replica", "(dp)")]
    axes += [(mesh.ep, "part", "of the experts (ep)")] if mesh.ep > 1 else []
    axes += [(mesh.cp, "part", "of a sequence (cp)")] if mesh.cp > 1 else []
    axes += [(size, "part", f"({axis})") for axis, size in mesh.others.items() if size > 1]
    axes += [(mesh.tp, "rank", "to a layer (tp)")]
    counts = " x ".join(f"{_count(size, name)} {axis}" for size, name, axis in axes)
    return f"{_count(mesh.world_size, 'rank')}: {counts}"


def _count(num: int, name: str) -> str:
    return f"{num} {name}" if num == 1 else f"{num} {name}s"


def _shown(size: int, most: int) -> list[int | None]:
    """Return the indices of an axis that are drawn; None stands for those left out."""
    return list(range(size)) if size <= most else [*range(most - 2), None, size - 1]


def _row(index: int, ep: int) -> str:
    """Return the name of a row: of a replica, or of the part of the experts that it has."""
    return f"dp {index}" if ep == 1 else f"dp {index // ep} ep {index % ep}"


def _draw_boxes(stages: Stages, most_stages: int, most_ranks: int, ep: int) -> list[str]:
    pp, dp, tp = _sizes(stages)
    rows = _shown(dp, _MOST_ROWS)
    labels = ["..." if row is None else _row(row, ep) for row in rows]
    blocks = [["", "", *labels, ""]]
    is_abbreviated = None in rows or tp > most_ranks
    width = max(len(str(pp * dp * tp - 1)), 3 if is_abbreviated else 1)
    for number in _shown(pp, most_stages):
        arrow = "  " if len(blocks) == 1 else " -> "
        blocks.append(["", "", *[arrow] * len(rows), ""])
        if number is None:
            blocks.append(["...", "", *["..."] * len(rows), ""])
        else:
            cells = (
                ["..."] * min(tp, most_ranks)
                if row is None
                else abbreviated(stages[number][row], most_ranks)
                for row in rows
            )
            lines = [" ".join(cell.rjust(width) for cell in row) for row in cells]
            blocks.append(_box(f"stage {number}", lines))
    widths = [max(map(len, block)) for block in blocks]
    return ["".join(map(str.ljust, parts, widths)).rstrip() for parts in zip(*blocks, strict=True)]


def _box(title: str, lines: list[str]) -> list[str]:
    width = max(len(lines[0]), len(title) - 2)
    border = f"+{'-' * (width + 2)}+"
    return [f" {title}", border, *(f"| {line.center(width)} |" for line in lines), border]


def _group_lines(mesh: "ParallelMesh", stages: Stages) -> list[str]:
    """Return a line for each axis of more than one rank: the groups along it, and within dp."""
    replicas = [group for stage in stages for group in zip(*stage, strict=True)]
    copies = mesh.copies
    groups: dict[str, list[tuple[int, ...]]] = {
        "pp groups, a pipeline each:     ": mesh.groups("pp"),
        "dp groups, of equal parameters: ": replicas,
        "  a copy of the state each:     ": [one for same in copies for one in same],
        "  equal shards of the copies:   ": [
            ranks for same in copies for ranks in zip(*same, strict=True)
        ],
        "ep groups, sharing experts:     ": mesh.groups("ep"),
        "  of equal experts:             ": mesh.groups("dp") if mesh.ep > 1 else [],
        "cp groups, of a sequence each:  ": mesh.groups("cp"),
        **{f"{axis} groups:".ljust(32): mesh.groups(axis) for axis in mesh.others},
        "tp groups, sharing each layer:  ": mesh.groups("tp"),
    }
    return [
        name + _fitted([" ".join(abbreviated(group, 4)) for group in sorted(found)], len(name))
        for name, found in groups.items()
        if found and len(found[0]) > 1
    ]


def _fitted(groups: Sequence[str], indent: int) -> str:
    lines = (
        " | ".join(abbreviated(groups, most)) for most in range(_MOST_COLUMNS, _FEWEST - 1, -1)
    )
    return next((line for line in lines if indent + len(line) <= _WIDTH), "...")


def _draw_cells(axes: Any, stages: Stages, ranks_per_node: int | None) -> None:
    """Draw the replicas as rows of coloured cells, a free column after each stage."""
    rows = []
    for replica in zip(*stages, strict=True):
        colours: list[float] = []
        for number, ranks in enumerate(replica):
            places = (rank // ranks_per_node if ranks_per_node else number for rank in ranks)
            colours += [*(place % _NUM_COLOURS for place in places), nan]
        rows.append(colours)
    axes.pcolormesh(rows, cmap="Set3", vmin=0, vmax=_NUM_COLOURS - 1, edgecolors="white")


def _label_ranks(axes: Any, stages: Stages, font_size: float) -> None:
    step = len(stages[0][0]) + 1
    for number, stage in enumerate(stages):
        for row, ranks in enumerate(stage):
            for column, rank in enumerate(ranks, start=number * step):
                axes.text(
                    column + 0.5, row + 0.5, rank, ha="center", va="center", fontsize=font_size
                )


def _ticks(size: int) -> range:
    return range(0, size, -(-size // _MOST_TICKS))


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
        others: Number of ranks along further axes, each of which comes before tp.

    Raises:
        ConfigError: A size is below 1, the order does not name each axis once, or copies of the
            state would not be equally large.
    """

    pp: AtLeastOne = 1
    dp: AtLeastOne = 1
    tp: AtLeastOne = 1
    axis_order: tuple[KnownAxis, ...] = AXES
    shard: AtLeastOne | None = None
    cp: AtLeastOne = 1
    ep: AtLeastOne = 1
    others: Annotated[dict[Axis, int], _FURTHER] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Refuse sizes and orders that make no grid."""
        with told_by(ParallelMesh):
            check_fields(self)
            known = self._known_axes
            object.__setattr__(self, "axis_order", _with_optional(self.axis_order, known))
            if sorted(self.axis_order) != sorted(known):
                raise ConfigError(
                    f"axis_order must name each of {', '.join(known)} once, got {self.axis_order}."
                )
            if self.shard is not None and self.dp % self.shard:
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
        axis_order: Sequence[KnownAxis] = AXES,
        others: dict[Axis, int] | None = None,
    ) -> Self:
        """Make the mesh of all of `world_size` ranks; an axis of -1 takes what the others leave.

        Raises:
            ConfigError: A size is neither -1 nor at least 1, two are -1, or they do not multiply
                to the world's; with the nearest sizes that do.
        """
        known: dict[Axis, int] = {"pp": pp, "dp": dp, "ep": ep, "cp": cp, "tp": tp}
        of_all = {**known, **(others or {})}
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
            found = {**of_all, **sizes}
            further = {axis: found.pop(axis) for axis in of_all if axis not in known}
            return cls(**found, others=further, axis_order=tuple(axis_order))
        raise ConfigError(f"{problem} Sizes that fit: {_nearest_sizes(world_size, asked)}.")

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of this mesh."""
        *before, last = ALL_AXES
        found = (*before, *self.others, last)
        return tuple(axis for axis in found if axis in AXES or self.size(axis) != 1)

    @property
    def grid(self) -> RankGrid:
        """The axes with their sizes, in their order."""
        order = _with_optional(self.axis_order, self.axes)
        return RankGrid({axis: self.size(axis) for axis in order})

    @property
    def copies(self) -> list[list[tuple[int, ...]]]:
        """The ranks of each copy of the state, of those that average the same; none for one."""
        size, averaging = (self.shard or self.dp) * self.cp, self.groups(("dp", "ep", "cp"))
        if size == len(averaging[0]) or self.shard is None:
            return []
        return [[one[at : at + size] for at in range(0, len(one), size)] for one in averaging]

    @property
    def _known_axes(self) -> tuple[Axis, ...]:
        """The axes that an order names."""
        return tuple(axis for axis in self.axes if axis not in self.others)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.grid.num_ranks

    def size(self, *axes: Axis) -> int:
        """Number of ranks along an axis, or along several together."""
        return prod(self.others[one] if one in self.others else getattr(self, one) for one in axes)

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
        known = (*ALL_AXES, *self.others)
        return [axis for axis in along if axis not in known or axis in self.axes]

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
        ordered = replace(self, axis_order=AXES)._nodes_per_group(ranks_per_node)
        if nodes.get("pp") == 1 and nodes.get("dp", 1) > ordered.get("dp", 1):
            warnings.append(
                f"dp crosses nodes of {ranks_per_node} ranks and pp does not, though a model's "
                "gradients are more than what passes between its stages; "
                f"axis_order={self._known_axes} puts pp across nodes."
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
        order = "" if self.axis_order[-1] == "tp" else f"axis_order={self._known_axes}"
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
        sizes = self.grid.sizes
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def save_png(self, path: str | Path, *, ranks_per_node: int | None = None) -> None:
        """Draw the grid into a PNG file, a colour per stage, or per node where its size is given.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        save_mesh_png(self, path, ranks_per_node=ranks_per_node)

    def __str__(self) -> str:
        return draw_mesh(self)

    def __repr__(self) -> str:
        order = "" if self.axis_order == self._known_axes else f", axis_order={self.axis_order}"
        shard = "" if self.shard is None else f", shard={self.shard}"
        return (
            f"ParallelMesh({_named({axis: self.size(axis) for axis in self.axes})}{order}{shard})"
        )


def _with_optional(order: Sequence[Axis], axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Return an order that names the optional of `axes`, and those alone."""
    named = [axis for axis in order if axis in AXES or axis in axes]
    for axis in axes:
        if axis not in (*AXES, *named) and {"dp", "tp"} <= set(named):
            named.insert(named.index("dp") + 1 if axis == "ep" else named.index("tp"), axis)
    return tuple(named)


def _nodes(ranks: Sequence[int], ranks_per_node: int) -> set[int]:
    return {rank // ranks_per_node for rank in ranks}


def _named(sizes: Mapping[Axis, int], between: str = ", ") -> str:
    return between.join(f"{axis}={size}" for axis, size in sizes.items())


def _nearest_sizes(
    world_size: int, asked: Mapping[Axis, int], allows_tp: Callable[[int], bool] = lambda _: True
) -> str:
    """Name the sizes that multiply to the world's and differ least, as factors, from `asked`."""
    known = dict.fromkeys([*ALL_AXES, *asked])
    axes = [axis for axis in known if axis in AXES or asked.get(axis, 1) != 1]
    by_traffic = [axis for axis in dict.fromkeys([*_BY_TRAFFIC, *axes]) if axis in axes]
    fitting = [one for one in sizes_of(world_size, by_traffic) if allows_tp(one["tp"])]

    def distance(sizes: dict[Axis, int]) -> tuple[Fraction, ...]:
        factors = [
            max(ratio := Fraction(sizes[axis], asked.get(axis, sizes[axis])), 1 / ratio)
            for axis in by_traffic
        ]
        return (prod(factors, start=Fraction(1)), *factors)  # of equals, the one that keeps tp

    nearest = sorted(fitting, key=distance)[:_NUM_PROPOSALS]
    return "; ".join(_named({axis: sizes[axis] for axis in axes}) for sizes in nearest)
