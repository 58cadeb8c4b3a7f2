"""The table of the documentation, written from what is declared, which the tests try."""

from collections.abc import Iterator
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
    return "\n".join([HEAD, _counts(), *_lines()]) + "\n"


def _counts() -> str:
    cells = [_cell(feature, column) for feature in FEATURES for column in COLUMNS]
    refused, broken = cells.count("no"), cells.count("broken")
    return (
        f"{len(FEATURES)} features under {len(COLUMNS)} strategies: "
        f"{len(cells) - refused - broken} cells work, {refused} are refused by name, "
        f"{broken} are broken.\n"
    )


def _lines() -> Iterator[str]:
    for group in dict.fromkeys(feature.group for feature in FEATURES):
        rows = [feature for feature in FEATURES if feature.group == group]
        yield f"## {group}\n"
        yield f"| feature | {' | '.join(f'`{name}`' for name in COLUMNS)} |"
        yield "|---" * (len(COLUMNS) + 1) + "|"
        for feature in rows:
            cells = (_cell(feature, column) for column in COLUMNS)
            yield f"| {feature.title} | {' | '.join(cells)} |"
        yield ""
        yield from _refusals(rows)


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
