"""Drawings as SVG, inside a page that gives them their colours: no script, no file, no request.

    lines       one or more series over the steps
    columns     what a step consists of, one on top of the other
    bars        the same of each rank, in rows
    timeline    what ranks did, in rows

What a mark means is told by its `title`, which browsers show under the pointer.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from statistics import fmean, median

from lightning_shard.core.reporting.figures_of_run import averages
from lightning_shard.core.reporting.records import TimelineEvent

# The parts that sections of a report are made of.

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def seconds_of(seconds: float) -> str:
    """Write seconds with three digits, in the largest unit of which there is one."""
    if seconds == 0:
        return "0 s"
    size, unit = next((one for one in _UNITS if abs(seconds) >= one[0]), _UNITS[-1])
    return f"{seconds / size:.3g} {unit}" if seconds < 999 else f"{seconds:,.0f} s"


def rate(number: float, unit: str = "") -> str:
    """Write a number with three digits and a prefix, such as 12.3 k."""
    size, prefix = next((one for one in _PREFIXES if abs(number) >= one[0]), (1.0, ""))
    return f"{number / size:.3g} {prefix}{unit}".rstrip()


def percent(share: float) -> str:
    """Write a share as a percentage."""
    return f"{share:.1%}"


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of plain text."""
    attribute = f' class="{kind}"' if kind else ""
    return f"<p{attribute}>{escape(text)}</p>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: Sequence[int] = ()) -> str:
    """Return a table."""
    marks = dict.fromkeys(words, ' class="words"')
    body = "".join(
        "<tr>"
        + "".join(f"<td{marks.get(n, '')}>{escape(cell)}</td>" for n, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="scroll"><table><tr>{names}</tr>{body}</table></div>'


def legend(classes: Mapping[str, str]) -> str:
    """Return which colour is what."""
    items = "".join(
        f'<li><i class="{kind}"></i>{escape(name)}</li>' for name, kind in classes.items()
    )
    return f'<ul class="legend">{items}</ul>'


def tiles(figures: Mapping[str, str]) -> str:
    """Return the figures that matter most, each with its name."""
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><b>{escape(value)}</b>{escape(name)}</div>'
            for name, value in figures.items()
        )
        + "</div>"
    )


def colours(names: Iterable[str]) -> dict[str, str]:
    """Give each name a colour of its own, as far as there are ten."""
    return {name: f"s{number % 10}" for number, name in enumerate(names)}


Point = tuple[float, float]
Write = Callable[[float], str]

_WIDTH, _HEIGHT = 860, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 14, 24, 44
_ROW = 22
_MOST_POINTS, _MOST_COLUMNS = 400, 100
_MOST_LABELS = 300  # in a timeline: more would not be legible
_LABEL_WIDTH = 22


def lines(series: Mapping[str, Sequence[Point]], *, title: str, write: Write = str) -> str:
    """Draw series over the steps, each as a line in a colour of its own."""
    thin = {name: _thinned(points) for name, points in series.items() if points}
    every = [point for points in thin.values() for point in points]
    frame = _Frame.around(every)
    drawn = []
    for number, (name, points) in enumerate(thin.items()):
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
        drawn.append(f'<polyline class="line s{number}" points="{path}"/>')
        drawn += [
            f'<circle class="s{number}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.5">'
            f"<title>{escape(name)}, step {x:g}: {escape(write(y))}</title></circle>"
            for x, y in points
        ]
    return _svg(_HEIGHT, title, frame.axes(write) + drawn + _axis_titles(title))


def columns(
    steps: Mapping[int, Mapping[str, float]], classes: Mapping[str, str], *, title: str
) -> str:
    """Draw what each step consists of, in seconds by part; neighbours join where there are many."""
    joined = _joined(steps)
    most = max(sum(parts.values()) for _, parts in joined)
    frame = _Frame(0, len(joined), 0.0, most or 1.0)
    width = (frame.x(1) - frame.x(0)) * 0.9
    drawn = []
    for place, (name, parts) in enumerate(joined):
        below = 0.0
        for part, kind in classes.items():
            seconds = parts.get(part, 0.0)
            top, height = frame.y(below + seconds), frame.y(below) - frame.y(below + seconds)
            below += seconds
            drawn.append(
                f'<rect class="{kind}" x="{frame.x(place):.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{height:.2f}"><title>step {name}: {escape(part)} '
                f"{seconds_of(seconds)}</title></rect>"
            )
    labels = [
        f'<text class="tick" x="{frame.x(place):.1f}" y="{_HEIGHT - 26}">{joined[place][0]}</text>'
        for place in range(0, len(joined), max(1, len(joined) // 8))
    ]
    named = _axis_titles("seconds a step")
    return _svg(_HEIGHT, title, frame.levels(seconds_of) + drawn + labels + named)


def bars(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    classes: Mapping[str, str],
    *,
    title: str,
    write: Write,
) -> str:
    """Draw rows of parts, one beside the other."""
    most = max((sum(parts.values()) for _, parts in rows), default=0.0) or 1.0
    scale = (_WIDTH - 2 * _LABEL_COLUMN) / most
    drawn = []
    for number, (label, parts) in enumerate(rows):
        y, x = _TOP + number * _ROW, float(_LABEL_COLUMN)
        middle = y + _ROW * 0.6
        drawn.append(
            f'<text class="label" x="{_LABEL_COLUMN - 8}" y="{middle:.1f}">{escape(label)}</text>'
        )
        for part, kind in classes.items():
            value = parts.get(part, 0.0)
            width = value * scale
            drawn.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.2f}" height="{_ROW - 6}">'
                f"<title>{escape(label)}: {escape(part)} {escape(write(value))}</title></rect>"
            )
            x += width
        drawn.append(
            f'<text x="{x + 6:.1f}" y="{middle:.1f}">{escape(write(sum(parts.values())))}</text>'
        )
    return _svg(_TOP * 2 + _ROW * len(rows), title, drawn)


_LABEL_COLUMN = 130


def timeline(events: Sequence[TimelineEvent], classes: Mapping[str, str], *, title: str) -> str:
    """Draw what the ranks of a pipeline did, a row for each."""
    shown = [one for one in events if one.category in classes]
    ranks = sorted({one.rank for one in shown})
    end = max((one.start + one.seconds for one in shown), default=1.0) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    drawn = [
        f'<text class="label" x="{_LEFT - 8}" y="{_TOP + row * _ROW + 13}">rank {rank}</text>'
        for row, rank in enumerate(ranks)
    ]
    for one in shown:
        x, y = _LEFT + one.start * scale, _TOP + ranks.index(one.rank) * _ROW
        width = max(one.seconds * scale, 0.3)
        drawn.append(
            f'<rect class="{classes[one.category]} edge" x="{x:.1f}" y="{y}" width="{width:.1f}" '
            f'height="{_ROW - 4}"><title>rank {one.rank}: {escape(one.name)}, '
            f"{escape(one.category)}, {seconds_of(one.seconds)}</title></rect>"
        )
        if len(shown) <= _MOST_LABELS and width > _LABEL_WIDTH:
            drawn.append(
                f'<text class="inside" x="{x + width / 2:.1f}" y="{y + 13}">'
                f"{escape(one.name)}</text>"
            )
    bottom = _TOP + len(ranks) * _ROW
    drawn += [
        f'<text class="tick" x="{_LEFT + share * end * scale:.1f}" y="{bottom + 14}">'
        f"{seconds_of(share * end)}</text>"
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    return _svg(bottom + 22, title, drawn)


class _Frame:
    """The coordinates of a drawing: steps to the right, values upwards."""

    def __init__(self, first: float, last: float, low: float, high: float) -> None:
        self._first, self._low, self._high = first, low, high
        self._last = last if last > first else first + 1

    @classmethod
    def around(cls, points: Sequence[Point]) -> "_Frame":
        """Return the frame in which all points lie."""
        xs, ys = zip(*points, strict=True)
        low, high = min(ys), max(ys)
        margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        return cls(min(xs), max(xs), low - margin, high + margin)

    def x(self, value: float) -> float:
        """Return where a step is."""
        share = (value - self._first) / (self._last - self._first)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Return where a value is."""
        share = (value - self._low) / (self._high - self._low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)

    def levels(self, write: Write) -> list[str]:
        """Draw lines at round values."""
        drawn = []
        for value in _round_values(self._low, self._high):
            y = self.y(value)
            drawn.append(
                f'<line class="level" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" '
                f'y2="{y:.1f}"/>'
            )
            drawn.append(
                f'<text class="label" x="{_LEFT - 8}" y="{y + 4:.1f}">{escape(write(value))}</text>'
            )
        return drawn

    def axes(self, write: Write) -> list[str]:
        """Draw lines at round values, and round steps under them."""
        steps = [one for one in _round_values(self._first, self._last) if one == int(one)]
        return self.levels(write) + [
            f'<text class="tick" x="{self.x(one):.1f}" y="{_HEIGHT - 26}">{one:g}</text>'
            for one in steps
        ]


def _round_values(low: float, high: float, about: int = 5) -> list[float]:
    """Return some multiples of 1, 2 or 5 times a power of ten between two values."""
    exact = (high - low) / about
    power = 10.0 ** math.floor(math.log10(exact))
    width = next(one * power for one in (1, 2, 5, 10) if one * power >= exact * 0.999)
    first, last = math.ceil(low / width), math.floor(high / width)
    return [round(number * width, 12) for number in range(first, last + 1)]


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return as many points as can be told apart, each the median of its neighbours."""
    size = -(-len(points) // _MOST_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(part[-1][0], median(y for _, y in part)) for part in parts]


def _joined(steps: Mapping[int, Mapping[str, float]]) -> list[tuple[str, dict[str, float]]]:
    """Return the parts of neighbouring steps, each the mean, with the steps' numbers."""
    numbers = list(steps)
    size = -(-len(numbers) // _MOST_COLUMNS)
    found = []
    for start in range(0, len(numbers), size):
        some = numbers[start : start + size]
        means = averages((steps[number] for number in some), fmean)
        found.append((f"{some[0]}" if size == 1 else f"{some[0]} to {some[-1]}", means))
    return found


def _axis_titles(values: str) -> list[str]:
    """Name both axes: values upwards, steps to the right."""
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return [
        f'<text class="axis" x="4" y="12">{escape(values)}</text>',
        f'<text class="tick axis" x="{middle}" y="{_HEIGHT - 8}">step</text>',
    ]


def _svg(height: float, title: str, drawn: Sequence[str]) -> str:
    return (
        f'<div class="scroll"><svg role="img" aria-label="{escape(title)}" '
        f'viewBox="0 0 {_WIDTH} {height:g}" preserveAspectRatio="xMinYMin meet">'
        f"{''.join(drawn)}</svg></div>"
    )
