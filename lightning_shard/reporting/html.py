"""The parts that sections of a report are made of."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from lightning_shard.reporting.output import format_bytes

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def bytes_of(size: float) -> str:
    """Write bytes in their largest unit."""
    return format_bytes(round(size))


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
    """Return a table.

    Args:
        head: Headings of the columns.
        rows: Cells of plain text.
        words: Columns that hold words, which may take several lines.
    """
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
