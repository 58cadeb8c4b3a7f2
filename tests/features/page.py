"""The table of the documentation, written from what is declared, which the tests try."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from tests.features.columns import COLUMNS
from tests.features.declared import Feature
from tests.features.rows import FEATURES

PAGE = Path(__file__).parents[2] / "docs" / "features.md"
HEAD = """# Lightning's features under each strategy

"yes": the feature does under the strategy what it does on one device: the same weights, logged
values, files and calls of hooks. "own": it works, and numbers are by design those of a rank's own
training, or else why stands below the table. "no": the strategy refuses it with an error that says
what to do; what the error says stands there too. "broken": it goes wrong and no error says what to
do; how stands there as well.

Each cell is a test: `pytest tests/features`. The ranks are two of one process, under
`hybrid_parallel` four, in two stages and two copies; `local_sgd` averages after every step, and
`async_sgd` has a bound of 0. This page is written by `python -m tests.features --write
docs/features.md`.
"""


def page() -> str:
    """Return the Markdown page."""
    return (
        "\n".join([HEAD, counts(FEATURES, COLUMNS, "features"), *tables(FEATURES, COLUMNS)]) + "\n"
    )


def counts(rows: Sequence[Feature], columns: Collection[str], called: str) -> str:
    """Return the sentence that counts the cells of rows that are called features, say."""
    cells = [_cell(row, column) for row in rows for column in columns]
    refused, broken = cells.count("no"), cells.count("broken")
    return (
        f"{len(rows)} {called} under {len(columns)} strategies: "
        f"{len(cells) - refused - broken} cells work, {refused} are refused by name, "
        f"{broken} are broken.\n"
    )


def tables(
    rows: Sequence[Feature], columns: Collection[str], first: str = "feature"
) -> Iterator[str]:
    """Yield the lines of a table for each group, and of what refusals say."""
    for group in dict.fromkeys(row.group for row in rows):
        of_group = [row for row in rows if row.group == group]
        yield f"## {group}\n"
        yield f"| {first} | {' | '.join(f'`{name}`' for name in columns)} |"
        yield "|---" * (len(columns) + 1) + "|"
        for row in of_group:
            cells = (_cell(row, column) for column in columns)
            yield f"| {row.title} | {' | '.join(cells)} |"
        yield ""
        yield from _refusals(of_group)


def _refusals(rows: list[Feature]) -> Iterator[str]:
    for feature in rows:
        messages = {**feature.refused, **feature.broken}
        for message in dict.fromkeys(messages.values()):
            names = [f"`{name}`" for name, said in messages.items() if said == message]
            yield f'- {feature.title} under {", ".join(names)}: "... {message} ..."'
        if feature.why:
            names = [f"`{name}`" for name in feature.own]
            yield f"- {feature.title} under {', '.join(names)}: own, since {feature.why}"
    if any(feature.refused or feature.broken or feature.why for feature in rows):
        yield ""


def _cell(feature: Feature, column: str) -> str:
    if column in feature.refused:
        return "no"
    if column in feature.broken:
        return "broken"
    return "own" if column in feature.own else "yes"
