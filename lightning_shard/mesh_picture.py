"""A grid of ranks as text and as a picture: the stages side by side, a row for each replica.

    8 ranks: 2 stages (pp) x 2 replicas (dp) x 2 ranks to a layer (tp)

           stage 0      stage 1
          +-------+    +-------+
    dp 0  |  0 1  | -> |  4 5  |
    dp 1  |  2 3  | -> |  6 7  |
          +-------+    +-------+

Where an axis does not fit, entries between its first and its last are left out.
"""

from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Any

from lightning_shard.figures import new_figure

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


def draw_mesh(stages: Stages, *, shard: int | None = None, cp: int = 1, ep: int = 1) -> str:
    """Draw the grid and list its groups, at most 100 columns wide.

    Args:
        stages: Ranks by stage, replica and place in the tensor-parallel group; those of one
            sequence's parts one after the other, replicas that share experts as well.
        shard: Number of replicas that shard one copy of the state; None: all.
        cp: Number of parts of each sequence.
        ep: Number of replicas that share the experts.
    """
    most_stages, most_ranks = (
        min(size, _MOST_COLUMNS) for size in (len(stages), len(stages[0][0]))
    )
    while True:
        lines = _draw_boxes(stages, most_stages, most_ranks, ep)
        if len(lines[1]) <= _WIDTH or max(most_stages, most_ranks) <= _FEWEST:
            break
        if most_stages > most_ranks:
            most_stages -= 1
        else:
            most_ranks -= 1
    return "\n".join(
        [_summary(stages, cp, ep), "", *lines, "", *_group_lines(stages, shard, cp, ep)]
    ).rstrip()


def abbreviated(items: Sequence[object], most: int) -> list[str]:
    """Write each item, or the first ones, an ellipsis and the last where there are too many."""
    return ["..." if index is None else str(items[index]) for index in _shown(len(items), most)]


def save_mesh_png(
    stages: Stages,
    path: str | Path,
    *,
    ranks_per_node: int | None = None,
    cp: int = 1,
    ep: int = 1,
) -> None:
    """Draw the grid into a PNG file, a colour per stage, or per node where its size is given.

    Raises:
        ConfigError: matplotlib is not installed.
    """
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
        [index + 0.5 for index in rows_shown], [_row(index, ep) for index in rows_shown]
    )
    axes.tick_params(length=0, labelsize=8)
    axes.invert_yaxis()
    axes.set_frame_on(False)
    colours = (
        f"a colour per node of {ranks_per_node} ranks" if ranks_per_node else "a colour per stage"
    )
    axes.set_title(f"{_summary(stages, cp, ep)}\n{colours}", fontsize=8)
    figure.savefig(path, format="png", dpi=150)


def _sizes(stages: Stages) -> tuple[int, int, int]:
    return len(stages), len(stages[0]), len(stages[0][0])


def _summary(stages: Stages, cp: int, ep: int) -> str:
    pp, dp, ranks = _sizes(stages)
    axes = [(pp, "stage", "(pp)"), (dp // ep, "replica", "(dp)")]
    axes += [(ep, "part", "of the experts (ep)")] if ep > 1 else []
    axes += [(cp, "part", "of a sequence (cp)")] if cp > 1 else []
    axes += [(ranks // cp, "rank", "to a layer (tp)")]
    counts = " x ".join(f"{_count(size, name)} {axis}" for size, name, axis in axes)
    return f"{_count(pp * dp * ranks, 'rank')}: {counts}"


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


def _copies(stages: Stages, shard: int, cp: int) -> list[list[tuple[int, ...]]]:
    """Return the ranks of each copy of the state, of those that average the same gradients."""
    found = []
    for stage in stages:
        for places in zip(
            *(zip(*_in_parts(ranks, cp), strict=True) for ranks in stage), strict=True
        ):
            averaging = sorted(rank for ranks in places for rank in ranks)
            starts = range(0, len(averaging), shard * cp)
            found.append([tuple(averaging[start : start + shard * cp]) for start in starts])
    return found


def _in_parts(ranks: Sequence[int], cp: int) -> list[Sequence[int]]:
    """Return the ranks of each part of a sequence."""
    size = len(ranks) // cp
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]


def _group_lines(stages: Stages, shard: int | None, cp: int, ep: int) -> list[str]:
    """Return a line for each axis of more than one rank: the groups along it, and within dp."""
    replicas = [group for stage in stages for group in zip(*stage, strict=True)]
    size = len(replicas[0])
    copies = _copies(stages, shard, cp) if shard is not None and shard < size else []
    groups: dict[str, list[tuple[int, ...]]] = {
        "pp groups, a pipeline each:     ": [
            group for replica in zip(*stages, strict=True) for group in zip(*replica, strict=True)
        ],
        "dp groups, of equal parameters: ": replicas,
        "  a copy of the state each:     ": [one for same in copies for one in same],
        "  equal shards of the copies:   ": [
            ranks for same in copies for ranks in zip(*same, strict=True)
        ],
        "ep groups, sharing experts:     ": [
            group[first : first + ep] for group in replicas for first in range(0, size, ep)
        ],
        "  of equal experts:             ": [
            group[part::ep] for group in replicas for part in range(ep if ep > 1 else 0)
        ],
        "cp groups, of a sequence each:  ": [
            tuple(ranks[place :: len(ranks) // cp])
            for stage in stages
            for ranks in stage
            for place in range(len(ranks) // cp)
        ],
        "tp groups, sharing each layer:  ": [
            tuple(ranks[part * len(ranks) // cp : (part + 1) * len(ranks) // cp])
            for stage in stages
            for ranks in stage
            for part in range(cp)
        ],
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
