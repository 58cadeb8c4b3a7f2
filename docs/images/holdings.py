"""Draw what each rank holds under each strategy: the SVG files that lie beside this one.

    python docs/images/holdings.py            write them

A square is the model, or what belongs to each of its parameters: layers from top to bottom, parts
of each layer from left to right. What a rank holds of it is filled. The square of the batch has
samples from top to bottom, and positions of their sequences from left to right. Every picture is
drawn twice, for a light page and for a dark one.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import TypeAlias

Cells: TypeAlias = frozenset[tuple[int, int]]
"""Pairs of a layer and a part of it; of a batch, of a sample and a range of positions."""

BATCH, PARAMETERS, GRADIENTS, STATE = KINDS = (
    "batch",
    "parameters",
    "gradients",
    "optimizer state",
)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """The ranks of a strategy.

    Attributes:
        says: A few words beside the name, or below it.
        ranks: What each holds, by number and kind.
        hatched: Parameters that a rank has for the time of a layer, or as they were earlier.
        groups: Names of neighbouring ranks, with how many they are.
    """

    name: str
    says: str
    ranks: Mapping[int, Mapping[str, Cells]]
    hatched: Mapping[int, Cells] = field(default_factory=dict)
    num_samples: int = 4
    num_parts: int = 4
    groups: tuple[tuple[str, int], ...] = ()

    def shape(self, kind: str) -> tuple[int, int]:
        """Return how many rows and columns the square of a kind has."""
        return (self.num_samples, 4) if kind == BATCH else (4, self.num_parts)

    def share(self, kind: str) -> Fraction:
        """Return how much of a kind each rank holds, which is the same for all."""
        num_rows, num_columns = self.shape(kind)
        (num_cells,) = {len(one[kind]) for one in self.ranks.values()}
        return Fraction(num_cells, num_rows * num_columns)


def area(rows: Iterable[int], columns: Iterable[int]) -> Cells:
    """Return the cells in all of these rows and columns."""
    return frozenset(product(rows, columns))


def row(number: int) -> Cells:
    """Return one layer, or one sample."""
    return area([number], range(4))


def column(number: int) -> Cells:
    """Return one part of each layer, or of each sequence."""
    return area(range(4), [number])


def half(number: int) -> range:
    """Return the numbers of a half of four rows or columns."""
    return range(2 * number, 2 * number + 2)


ALL = area(range(4), range(4))


def holding(batch: Cells, parameters: Cells, gradients: Cells, state: Cells) -> dict[str, Cells]:
    """Return what a rank holds, by kind."""
    return dict(zip(KINDS, (batch, parameters, gradients, state), strict=True))


def alike(batch: Cells, model: Cells) -> dict[str, Cells]:
    """Return a rank that holds as much of gradients and optimizer state as of parameters."""
    return holding(batch, model, model, model)


def four(of_rank: Callable[[int], dict[str, Cells]]) -> dict[int, dict[str, Cells]]:
    """Return what each of four ranks holds."""
    return {rank: of_rank(rank) for rank in range(4)}


def stage_of(pp: int) -> Panel:
    """Return one stage of two, with two copies of two parts of each layer."""
    ranks = {
        4 * pp + 2 * dp + tp: holding(
            area(half(dp), range(4)),
            area(half(pp), half(tp)),
            area(half(pp), half(tp)),
            area(half(pp), [2 * tp + dp]),
        )
        for dp, tp in product(range(2), range(2))
    }
    copies = (("dp 0: tp 0, 1", 2), ("dp 1: tp 0, 1", 2))
    return Panel(
        name=f"stage {pp}", says=f"layers {2 * pp} and {2 * pp + 1}", ranks=ranks, groups=copies
    )


def elastic_of(name: str, says: str, numbers: tuple[int, ...]) -> Panel:
    """Return the ranks that are there, which share out shards and samples."""
    size = 12 // len(numbers)
    ranks = {}
    for place, number in enumerate(numbers):
        mine = range(place * size, (place + 1) * size)
        full, shard = area(range(4), range(12)), area(range(4), mine)
        ranks[number] = holding(area(mine, range(4)), full, shard, shard)
    return Panel(name=name, says=says, ranks=ranks, num_samples=12, num_parts=12)


def with_experts(rank: int) -> dict[str, Cells]:
    """Return a rank with one expert of four; the first four parts are what all ranks have."""
    expert, shared = area(range(4), (4 + 2 * rank, 5 + 2 * rank)), area(range(4), range(4))
    model = shared | expert
    return holding(row(rank), model, model, column(rank) | expert)


PANELS = {
    "shard_ddp": Panel(
        name="shard_ddp", says="a copy each", ranks=four(lambda rank: alike(row(rank), ALL))
    ),
    "zero1": Panel(
        name="zero1",
        says="the optimizer in shards",
        ranks=four(lambda rank: holding(row(rank), ALL, ALL, column(rank))),
    ),
    "zero2": Panel(
        name="zero2",
        says="the gradients as well",
        ranks=four(lambda rank: holding(row(rank), ALL, column(rank), column(rank))),
    ),
    "zero3": Panel(
        name="zero3",
        says="everything in shards",
        ranks=four(lambda rank: alike(row(rank), column(rank))),
        hatched={rank: row(1) - column(rank) for rank in range(4)},
    ),
    "tensor_parallel": Panel(
        name="tensor_parallel",
        says="a part of each layer",
        ranks=four(lambda rank: alike(ALL, column(rank))),
    ),
    "context_parallel": Panel(
        name="context_parallel",
        says="a part of each sequence",
        ranks=four(lambda rank: alike(column(rank), ALL)),
    ),
    "pipeline_parallel": Panel(
        name="pipeline_parallel",
        says="some of the layers",
        ranks=four(lambda rank: alike(ALL, row(rank))),
    ),
    "hybrid_parallel": Panel(
        name="hybrid_parallel",
        says="here 2 stages, 2 parts",
        ranks=four(lambda rank: alike(ALL, area(half(rank // 2), half(rank % 2)))),
    ),
    "hybrid_sharding": Panel(
        name="hybrid sharding",
        says="a copy on a node",
        ranks=four(lambda rank: alike(row(rank), area(range(4), half(rank % 2)))),
        hatched={rank: row(1) - area(range(4), half(rank % 2)) for rank in range(4)},
        groups=(("node 0", 2), ("node 1", 2)),
    ),
    "expert_parallel": Panel(
        name="expert_parallel_size=4",
        says="an expert each",
        ranks=four(with_experts),
        num_parts=12,
    ),
    "local_sgd": Panel(
        name="local_sgd",
        says="a copy each, of its own",
        ranks=four(lambda rank: alike(row(rank), ALL)),
    ),
    "async_sgd": Panel(
        name="async_sgd",
        says="no step is waited for",
        ranks=four(lambda rank: holding(row(rank), ALL, ALL, column(rank))),
        hatched={rank: ALL - column(rank) for rank in range(4)},
    ),
}
OVERVIEW = tuple(PANELS)[:8]
FILLED, EMPTY, HATCHED = "filled", "empty", "hatched"
GATHERED = (HATCHED, "there while this layer computes")
SQUARES = (
    ("", "Squares: layers down, parts of them across;"),
    ("", "of the batch samples down, positions across."),
)
USUAL = ((FILLED, "held"), (EMPTY, "held by others"))
PICTURES: dict[str, tuple[tuple[Panel, ...], tuple[tuple[str, str], ...]]] = {
    "shard_ddp": ((PANELS["shard_ddp"],), USUAL),
    "zero1_and_zero2": ((PANELS["zero1"], PANELS["zero2"]), USUAL),
    "zero3": ((PANELS["zero3"],), (*USUAL, GATHERED)),
    "hybrid_sharding": ((PANELS["hybrid_sharding"],), (*USUAL, GATHERED)),
    "tensor_parallel": ((PANELS["tensor_parallel"],), USUAL),
    "context_parallel": (
        (PANELS["context_parallel"],),
        (*USUAL, ("", "Of the batch: what it computes within blocks.")),
    ),
    "expert_parallel": (
        (PANELS["expert_parallel"],),
        (
            *USUAL,
            ("", "At the left what every token uses, at the"),
            ("", "right the four experts of each layer."),
        ),
    ),
    "pipeline_parallel": ((PANELS["pipeline_parallel"],), USUAL),
    "hybrid_parallel": ((stage_of(0), stage_of(1)), USUAL),
    "local_sgd": ((PANELS["local_sgd"],), USUAL),
    "async_sgd": ((PANELS["async_sgd"],), (*USUAL, (HATCHED, "held, some steps old"))),
    "elastic": (
        (
            elastic_of("four ranks", "shards of a fourth", (0, 1, 2, 3)),
            elastic_of("rank 2 is lost", "shards of a third", (0, 1, 3)),
        ),
        USUAL,
    ),
}
"""By file: the panels one below the other, and what the legend says."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
THEMES = {
    "light": ("#1f2328", "#59636e", "#e1e6ec", "#6e5bb8", "#2c6cb5", "#c4660a", "#1f7f5c"),
    "dark": ("#e6e9ee", "#a5adb8", "#3c444f", "#ab9cf0", "#67a9f0", "#f2a154", "#4fc79a"),
}
"""Colours of text, of fainter text, of what is not held, and of the kinds."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Lengths in units of a drawing: of a square, between two, of the labels, and of text."""

    square: float
    gap: float
    labels: float
    text: float


def drawing(width: float, height: float, theme: str, scale: float, parts: Iterable[str]) -> str:
    """Return the text of a file."""
    text, faint, empty, *colours = THEMES[theme]
    kinds = zip(KINDS, colours, strict=True)
    style = "".join(f".{kind.split()[0]}{{fill:{colour}}}" for kind, colour in kinds)
    style += f".none{{fill:{empty}}}text{{fill:{text};font-family:{FONT}}}.faint{{fill:{faint}}}"
    hatch = (
        '<pattern id="hatch" width="4" height="4" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path class="none" d="M0 0h4v4h-4z"/>'
        '<path class="parameters" d="M0 0h2v4h-2z"/></pattern>'
    )
    size = f'width="{width * scale:g}" height="{height * scale:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width:g} {height:g}">'
    return "\n".join([head, f"<style>{style}</style>", f"<defs>{hatch}</defs>", *parts, "</svg>\n"])


def words(x: float, y: float, size: float, what: str, *, kind: str = "", more: str = "") -> str:
    """Write text, of which (x, y) is the left end of its base line."""
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}"{named}{more}>{what}</text>'


CENTRED, BOLD = ' text-anchor="middle"', ' font-weight="600"'


def runs(cells: Cells, num_columns: int) -> Iterator[tuple[int, int, int]]:
    """Yield the row, the first column and the length of what is drawn as one."""
    if num_columns <= 4:
        yield from ((r, c, 1) for r, c in sorted(cells))
        return
    for r, c in sorted(cells):
        if (r, c - 1) not in cells:
            yield r, c, next(n for n in range(1, num_columns + 1) if (r, c + n) not in cells)


def square(
    x: float, y: float, side: float, shape: tuple[int, int], layers: Mapping[str, Cells]
) -> Iterator[str]:
    """Draw the cells of one square, by what fills them."""
    height, width = side / shape[0], side / shape[1]
    for fill, cells in layers.items():
        path = "".join(
            f"M{x + c * width:.5g} {y + r * height:.5g}"
            f"h{n * width - 1.5:.4g}v{height - min(1.5, height / 4):.4g}h{1.5 - n * width:.4g}z"
            for r, c, n in runs(cells, shape[1])
        )
        how = 'fill="url(#hatch)"' if fill == HATCHED else f'class="{fill}"'
        if path:
            yield f'<path {how} d="{path}"/>'


def ranks_of(panel: Panel, x: float, y: float, sizes: Sizes) -> Iterator[str]:
    """Draw a column of squares for each rank, below its number."""
    pitch = sizes.square + sizes.gap
    for number, held in panel.ranks.items():
        left = x + number % 4 * pitch  # who is lost leaves a gap
        label = f"rank {number}" if sizes.square > 40 else str(number)
        middle = left + sizes.square / 2
        yield words(middle, y - 5, sizes.text - 1, label, kind="faint", more=CENTRED)
        for line, kind in enumerate(KINDS):
            shape, hatched = panel.shape(kind), frozenset[tuple[int, int]]()
            if kind == PARAMETERS:
                hatched = panel.hatched.get(number, hatched)
            rest = area(range(shape[0]), range(shape[1])) - held[kind] - hatched
            layers = {"none": rest, HATCHED: hatched, kind.split()[0]: held[kind] - hatched}
            yield from square(left, y + line * pitch, sizes.square, shape, layers)


def labels(y: float, sizes: Sizes, share: Callable[[str], Fraction] | None = None) -> Iterator[str]:
    """Write the kinds at the left of their squares, and how much of each a rank holds."""
    for line, kind in enumerate(KINDS):
        lines = dict.fromkeys(kind.split() if sizes.labels < 100 else [kind], "")
        if share is not None:
            lines["all" if share(kind) == 1 else str(share(kind))] = "faint"
        middle = y + line * (sizes.square + sizes.gap) + sizes.square / 2
        for number, (what, fill) in enumerate(lines.items()):
            down = middle + (number - (len(lines) - 1) / 2) * sizes.text * 1.2 + sizes.text * 0.35
            yield words(0, down, sizes.text, what, kind=fill)


def groups_of(panel: Panel, x: float, y: float, sizes: Sizes) -> Iterator[str]:
    """Write the names of neighbouring ranks above them, over a line."""
    pitch, place = sizes.square + sizes.gap, 0
    for name, count in panel.groups:
        left, length = x + place * pitch, count * pitch - sizes.gap
        middle = left + length / 2
        yield words(middle, y - 5, sizes.text - 1, name, kind="faint", more=CENTRED)
        yield f'<path class="none" d="M{left:g} {y:g}h{length:g}v1.5h-{length:g}z"/>'
        place += count


def legend(y: float, size: float, entries: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Write what the fillings mean, one line each."""
    fills = {FILLED: 'class="parameters"', EMPTY: 'class="none"', HATCHED: 'fill="url(#hatch)"'}
    for number, (fill, what) in enumerate(entries):
        down = y + number * size * 1.5
        if fill:
            yield f'<path {fills[fill]} d="M0 {down - 10:g}h12v12h-12z"/>'
        yield words(19 if fill else 0, down, size, what, kind="faint")


def page_picture(name: str, theme: str) -> str:
    """Draw the picture at the head of a strategy's page."""
    sizes = Sizes(square=50, gap=10, labels=118, text=14)
    panels, entries = PICTURES[name]
    pitch = sizes.square + sizes.gap
    parts, y = list[str](), 0.0
    for panel in panels:
        y += 18
        parts += [words(0, y, 15, f"{panel.name}: {panel.says}", more=BOLD)]
        y += 26
        if panel.groups:
            parts += groups_of(panel, sizes.labels, y, sizes)
            y += 22
        parts += labels(y, sizes, panel.share)
        parts += ranks_of(panel, sizes.labels, y, sizes)
        y += len(KINDS) * pitch + 12
    entries = (*entries, *SQUARES)
    parts += legend(y + 8, 13, entries)
    return drawing(sizes.labels + 4 * pitch, y + len(entries) * 19.5 + 2, theme, 1.2, parts)


def overview(theme: str, across: int) -> str:
    """Draw eight strategies, so many beside each other."""
    sizes = Sizes(square=36, gap=7, labels=112 if across > 2 else 86, text=13)
    pitch = sizes.square + sizes.gap
    width, height = 4 * pitch + 42, len(KINDS) * pitch + 66
    parts = list[str]()
    for number, name in enumerate(OVERVIEW):
        x, y = sizes.labels + number % across * width, number // across * height
        if number % across == 0:
            parts += labels(y + 58, sizes)
        parts += [words(x, y + 16, 15, PANELS[name].name, more=BOLD)]
        parts += [words(x, y + 34, 13, PANELS[name].says, kind="faint")]
        parts += ranks_of(PANELS[name], x, y + 58, sizes)
    entries = (*USUAL, (HATCHED, GATHERED[1]))
    down = len(OVERVIEW) // across * height
    parts += legend(down + 14, 13, entries)
    total = sizes.labels + across * width - 40
    return drawing(total, down + len(entries) * 20 + 4, theme, 1, parts)


def pictures() -> Iterator[tuple[str, str]]:
    """Draw all pictures, with the names of their files."""
    for theme in THEMES:
        yield f"strategies-{theme}.svg", overview(theme, 4)
        yield f"strategies-narrow-{theme}.svg", overview(theme, 2)
        for name in PICTURES:
            yield f"{name}-{theme}.svg", page_picture(name, theme)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent
    for file, text in pictures():
        (folder / file).write_text(text)
