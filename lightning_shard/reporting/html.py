"""The parts that sections of a report are made of."""

from collections.abc import Iterable, Mapping, Sequence

from lightning_shard.reporting.texts import escape


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
